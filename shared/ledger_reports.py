"""What the ledger is asked about itself: counts, rewards, delays, and whether it adds up."""

from typing import NamedTuple

from sqlalchemy import func, select

from shared.experience import State
from shared.ledger_transactions import Transactions
from shared.schema import experiences, versions


class VersionReward(NamedTuple):
    """How the replies of one version were rewarded."""

    version: int
    replies: int
    rewarded: int
    reward_sum: float


class Reports(Transactions):
    """Questions that change nothing."""

    def counts(self) -> dict[State, int]:
        """Experiences per state."""
        rows = self._read(select(experiences.c.state, func.count()).group_by(experiences.c.state))
        found = {State(state): count for state, count in rows}
        return {state: found.get(state, 0) for state in State}

    def rewards(self) -> list[VersionReward]:
        """How each version's replies were rewarded, oldest version first."""
        version, reward = experiences.c.version_min, experiences.c.reward
        total = func.coalesce(func.sum(reward), 0.0)
        rows = self._read(select(version, func.count(), func.count(reward), total).group_by(version).order_by(version))
        return [VersionReward(*row) for row in rows]

    def feedback_to_served(self, version: int | None = None) -> list[float]:
        """For each trained experience, the seconds from its last feedback to the first reply that could use it.

        `version` asks only for what that version was the first to serve. A version that was never served itself,
        because a newer one came before its turn, is served by that one.
        """
        first = versions.alias()
        served = select(func.min(first.c.version)).where(
            first.c.version >= experiences.c.trained_version, first.c.served_at.is_not(None)
        )
        latency = versions.c.served_at - experiences.c.rewarded_at
        query = select(latency).join_from(experiences, versions, versions.c.version == served.scalar_subquery())
        if version is not None:
            query = query.where(versions.c.version == version)
        return [row[0] for row in self._read(query)]

    def imbalance(self) -> list[str]:
        """What in the ledger does not add up, a sentence each; empty when all is well."""
        trained = select(func.count()).where(experiences.c.state == State.TRAINED).scalar_subquery()
        consumed = select(func.coalesce(func.sum(versions.c.consumed), 0)).scalar_subquery()
        [(trained, consumed)] = self._read(select(trained, consumed))
        if trained != consumed:
            return [f"{trained} experiences are trained, but the versions consumed {consumed}"]
        return []
