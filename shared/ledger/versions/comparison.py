"""How versions have done: one since its rollout began, and the newest replies of each, as far as the ledger knows."""

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Double, Select, and_, case, delete, func, insert, select
from sqlalchemy import cast as as_type

from tuneloop.shared.evaluation.samples import Figures, SampleStatistics, Share, ratio_of_sums, spread
from tuneloop.shared.evaluation.scores import Figure
from tuneloop.shared.experience import Evaluator, State
from tuneloop.shared.ledger.storage.database import LedgerPart, alone
from tuneloop.shared.ledger.storage.schema import evaluations, exchanges, experiences, versions, worth
from tuneloop.shared.ledger.versions.drift import LONGEST

READ = 500

# The square of a reward of 1e300 would be no number any more.
_LARGEST = 1e100

# No reply is as late as that.
_NEVER = 1e300

_reward = case((worth > _LARGEST, _LARGEST), (worth < -_LARGEST, -_LARGEST), else_=worth)
_tokens = as_type(experiences.c.completion_tokens, Double)
_timed = and_(experiences.c.choice == 0, experiences.c.completion_tokens > 0)
# First what the traffic is divided by, so that all its replies are of one version, then what shares a reward.
_unit = func.coalesce(exchanges.c.user_id, experiences.c.task_id, experiences.c.run_id, experiences.c.msg_id)


class Comparisons(LedgerPart):
    def figures(self, version: int, since: float, *, refusals: Collection[re.Pattern[str]] = ()) -> Figures:
        """Of the replies that this version alone has written since then, a unit for each user, or else task or run."""
        near = self._read(_alone(select(_reward).where(worth.is_not(None)), version, since).limit(1))
        shift = near[0][0] if near else 0.0
        columns = (
            func.count(worth).label("rewarded"),
            func.coalesce(func.sum(_reward - shift), 0.0).label("reward"),
            func.count().label("replies"),
            func.sum(_tokens).label("tokens"),
            func.count().filter(_timed).label("timed"),
            func.coalesce(func.sum(exchanges.c.latency_s).filter(_timed), 0.0).label("seconds"),
            func.coalesce(func.sum(_tokens).filter(_timed), 0.0).label("timed_tokens"),
        )
        joined = select(*columns).join_from(experiences, exchanges, exchanges.c.msg_id == experiences.c.msg_id)
        units = _alone(joined.group_by(experiences.c.tenant, _unit), version, since).subquery().c
        [sums] = self._read(
            select(
                *_sums(units.rewarded, units.reward, units.rewarded),
                *_sums(units.replies, units.tokens, units.replies),
                *_sums(units.timed, units.seconds, units.timed_tokens),
            )
        )
        replies = _alone(select(func.substr(experiences.c.text, 1, LONGEST)), version, since)
        newest = replies.order_by(experiences.c.sampled_at.desc()).limit(READ)
        texts = [row[0] for row in self._read(newest)] if refusals else []
        return Figures(
            reward=_sample(sums[:7], shift),
            length=_sample(sums[7:14]),
            latency=_sample(sums[14:]),
            refusals=Share(sum(any(each.search(text) for each in refusals) for text in texts), len(texts)),
        )


def _alone(rows: Select[Any], version: int, since: float) -> Select[Any]:
    """Those rows, each reply once. They are found by their time, not by their version: a champion has very many."""
    # All states there are, so that the index by state and time serves; and nothing that one by version would.
    # SQLite takes a stretch with two ends for a short one.
    lately = and_(experiences.c.state.in_(list(State)), experiences.c.sampled_at.between(since, _NEVER))
    alone = and_(experiences.c.version_max == version, experiences.c.version_min + 0 == version)
    return rows.where(lately, alone, experiences.c.correction == 0)


def _sums(replies: Any, over: Any, under: Any) -> tuple[ColumnElement[Any], ...]:
    below = as_type(under, Double)
    products = (over, below, over * over, over * below, below * below)
    return func.sum(replies), func.count().filter(replies > 0), *(func.sum(each) for each in products)


def _sample(sums: Any, shift: float = 0.0) -> SampleStatistics:
    found = ratio_of_sums(*(float(each or 0) for each in sums))
    return found._replace(mean=found.mean + shift) if found.replies else found


#: Trained replies of a version by which its delay is measured.
_TRAINED = 1_000


class RewardHistory(LedgerPart):
    def newest(self, version: int, *, among: int) -> SampleStatistics:
        """The rewards `among` the newest replies of this version alone, a unit for each user, or else task or run."""
        alone = and_(experiences.c.version_max == version, experiences.c.correction == 0)
        newest = select(experiences.c.id).where(experiences.c.version_min == version)
        newest = newest.order_by(experiences.c.sampled_at.desc()).limit(among)
        totals = self._read(
            select(func.sum(worth), func.count(), func.min(case((worth.in_((0.0, 1.0)), 1), else_=0)))
            .join_from(experiences, exchanges, exchanges.c.msg_id == experiences.c.msg_id)
            .where(experiences.c.id.in_(newest.subquery().select()), alone, worth.is_not(None))
            .group_by(experiences.c.tenant, _unit)
        )
        replies = sum(count for _, count, _ in totals)
        if not replies:
            return SampleStatistics()
        mean = sum(total for total, _, _ in totals) / replies
        squares = sum((total - mean * count) ** 2 for total, count, _ in totals)
        binary = all(of_thumbs for _, _, of_thumbs in totals)
        return SampleStatistics(replies, len(totals), mean, spread(replies, len(totals), squares, replies), binary)

    def feedback_to_served(self, version: int) -> list[float]:
        delay = versions.c.served_at - experiences.c.rewarded_at
        query = select(delay).join_from(experiences, versions, versions.c.version == experiences.c.trained_version)
        of_it = and_(experiences.c.trained_version == version, versions.c.served_at.is_not(None))
        return sorted(row[0] for row in self._read(query.where(of_it).limit(_TRAINED)))


class Evaluation(NamedTuple):
    """A row of `evaluations`; `slice` is empty for all tasks together."""

    version: int
    evaluator: Evaluator
    metric: str
    slice: str
    value: float
    deviation: float
    samples: int
    evaluated_at: float


class Evaluations(LedgerPart):
    def trained_on(self, version: int) -> dict[int, int]:
        sampled = experiences.c.version_min
        query = select(sampled, func.count()).where(experiences.c.trained_version == version)
        return {row[0]: row[1] for row in self._read(query.group_by(sampled).order_by(sampled))}

    def of_versions(self, versions: Sequence[int]) -> list[Evaluation]:
        columns = (evaluations.c[name] for name in Evaluation._fields)
        order = (evaluations.c[name] for name in ("metric", "slice", "evaluator", "version"))
        rows = self._read(select(*columns).where(evaluations.c.version.in_(versions)).order_by(*order))
        return [Evaluation(*row)._replace(evaluator=Evaluator(row.evaluator)) for row in rows]

    def record(self, version: int, evaluator: Evaluator, figures: Sequence[Figure]) -> None:
        key = {"version": version, "evaluator": evaluator, "evaluated_at": self._clock()}
        with self._write() as connection:
            alone(connection, "evaluations")
            before = evaluations.c.version == version, evaluations.c.evaluator == evaluator
            connection.execute(delete(evaluations).where(*before))
            if figures:
                connection.execute(insert(evaluations), [key | each._asdict() for each in figures])

    def of(self, version: int, evaluator: Evaluator) -> tuple[Figure, ...]:
        columns = [evaluations.c[name] for name in Figure._fields]
        of_it = evaluations.c.version == version, evaluations.c.evaluator == evaluator
        rows = self._read(select(*columns).where(*of_it).order_by(evaluations.c.metric, evaluations.c.slice))
        return tuple(Figure(*row) for row in rows)
