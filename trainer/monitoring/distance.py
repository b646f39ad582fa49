"""How far the policy has come from the base model, where the method itself does not look at that."""

from collections.abc import Sequence

import structlog
import torch

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import Sample
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.metrics import Metrics
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.monitoring.drift import KL_BASE

_log = structlog.get_logger()

#: Of so many of a step's replies.
_MOST = 32


class Distance:
    """Measured after every `kl_every` steps, if at all; the base model is loaded for it and let go."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def measure(self, learner: Learner, replies: Sequence[Sample]) -> Metrics:
        """The mean over the tokens of replies that were sampled, in nats, if it is time."""
        wanted = self._settings.monitor.drift
        sampled = [each for each in replies if each.demonstration is None][:_MOST]
        if wanted.kl is None or learner.steps % wanted.kl_every or not sampled:
            return {}
        try:
            return {KL_BASE: learner.distance(learner.reference or learner.actor.reference(self._settings), sampled)}
        except torch.OutOfMemoryError:
            _log.warning("distance_not_measured", reason="it does not fit into the GPU's memory", step=learner.steps)
        except EnvironmentRefused as error:
            _log.warning("distance_not_measured", reason=str(error), step=learner.steps)
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # engines may share the GPU
        return {}
