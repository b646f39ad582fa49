"""How the newest replies of each version were rewarded, and how long their feedback took to be served."""

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import and_, func, select

from tuneloop.shared.evaluation.samples import SampleStatistics, spread
from tuneloop.shared.ledger.storage.schema import exchanges, experiences, feedback, version_events, versions, worth
from tuneloop.shared.ledger.storage.transactions import LedgerPart

#: Trained replies of a version by which its delay is told.
_TRAINED = 1_000

# First what the traffic is divided by, so that all its replies are of one version, then what shares a reward.
_unit = func.coalesce(exchanges.c.user_id, experiences.c.task_id, experiences.c.run_id, experiences.c.msg_id)


class RewardHistory(LedgerPart):
    """Figures for people; each costs the same however large the ledger is."""

    def newest(self, version: int, *, among: int) -> SampleStatistics:
        """The rewards of those `among` the newest replies that this version alone wrote and that have one.

        All replies to a user of a tenant are one unit, or else to a task, or of a run.
        """
        units: dict[tuple[str, str], list[float]] = defaultdict(list)
        alone = and_(experiences.c.version_max == version, experiences.c.correction == 0)
        newest = select(experiences.c.id).where(experiences.c.version_min == version)
        newest = newest.order_by(experiences.c.sampled_at.desc()).limit(among)
        joined = select(worth.label("reward"), experiences.c.tenant, _unit.label("unit")).join_from(
            experiences, exchanges, exchanges.c.msg_id == experiences.c.msg_id
        )
        for row in self._read(
            joined.where(experiences.c.id.in_(newest.subquery().select()), alone, worth.is_not(None))
        ):
            units[row.tenant, row.unit].append(row.reward)
        totals = [(sum(rewards), len(rewards)) for rewards in units.values()]
        replies = sum(count for _, count in totals)
        if not replies:
            return SampleStatistics()
        mean = sum(total for total, _ in totals) / replies
        squares = sum((total - mean * count) ** 2 for total, count in totals)
        return SampleStatistics(replies, len(totals), mean, spread(replies, len(totals), squares, replies))

    def feedback_to_served(self, version: int) -> list[float]:
        """The seconds from the feedback of replies that a version was trained on until it was served, in order."""
        delay = versions.c.served_at - experiences.c.rewarded_at
        query = select(delay).join_from(experiences, versions, versions.c.version == experiences.c.trained_version)
        of_it = and_(experiences.c.trained_version == version, versions.c.served_at.is_not(None))
        return sorted(row[0] for row in self._read(query.where(of_it).limit(_TRAINED)))

    def marks(self) -> Sequence[int]:
        """Numbers that grow when a reply, feedback, or an event of a version comes in."""
        tables = (experiences, feedback, version_events)
        counts = self._read_together(*(select(func.coalesce(func.max(each.c.id), 0)) for each in tables))
        return [rows[0][0] for rows in counts]
