"""How batches are taken, as the settings say it."""

from typing import NamedTuple, Self

from tuneloop.shared.experience import TrustedRaters
from tuneloop.shared.settings.settings import Settings


class BatchPolicy(NamedTuple):
    """How batches are taken. `max_staleness` is in versions, both timeouts are in seconds.

    `any_reply`: also of replies that are not samples of the policy. `edited`: also of those that were edited and not
    rated. `by_result`: a run's last call says how it went, so
    those before it need no feedback. `max_rater_share`: the part of a batch that one rater's word may make up.
    `max_backlog`: so many committed experiences stay when a version is registered.
    """

    order: str = "oldest"
    group_by: str = "none"
    group_size: int = 8
    group_timeout: float = 3600.0
    batch_timeout: float | None = None
    max_staleness: int | None = None
    any_reply: bool = False
    edited: bool = False
    by_result: bool = False
    max_rater_share: float = 1.0
    max_backlog: int | None = None
    trusted_raters: TrustedRaters = TrustedRaters()

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """What the settings say."""
        buffer, trainer = settings.buffer, settings.trainer
        return cls(
            order=buffer.order,
            group_by=buffer.group_by,
            group_size=buffer.group_size,
            group_timeout=buffer.group_timeout,
            batch_timeout=buffer.batch_timeout,
            max_staleness=trainer.max_staleness,
            any_reply=settings.algorithm.of_any_reply,
            edited=settings.algorithm.of_edited_answers,
            by_result=settings.algorithm.by_result,
            max_rater_share=settings.feedback.max_rater_share,
            max_backlog=buffer.max_backlog and buffer.max_backlog * buffer.train_batch_size,
            trusted_raters=settings.feedback.all_trusted(settings.judge),
        )
