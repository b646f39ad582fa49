"""What one rank of the trainer does, from its start to its end."""

from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.loop import run
from tuneloop.trainer.micro_batch import fit_to_memory
from tuneloop.trainer.models.model import device_of
from tuneloop.trainer.ranks.orders import EndOrder
from tuneloop.trainer.ranks.ranks import JoinedRanks
from tuneloop.trainer.stop import Stop
from tuneloop.trainer.workers.follower import follow


def take_part(settings: Settings, stop: Stop) -> None:
    """Train as the rank that the environment names. Raises what `run` raises, or RankFailed."""
    together = settings.trainer.ulysses_sequence_parallel_size
    serve(settings, JoinedRanks.join(device_of(settings), together=together), stop)


def serve(settings: Settings, ranks: JoinedRanks, stop: Stop) -> None:
    """Lead as rank 0, whom alone `stop` tells to stop, or follow it."""
    if ranks.rank:
        follow(fit_to_memory(settings), ranks)
    else:
        run(settings, stop, ranks)
        ranks.lead(EndOrder())
    ranks.leave()
