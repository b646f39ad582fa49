"""How much one rater's word weighs: beside others' about the same reply, and in a batch.

Who says more than most others in the newest feedback, or less, weighs less where others spoke too. In a batch no rater
has more than its share: a row's reward is shared by those who said it, by their weights, and what is beyond the share
waits. The application's own word, which names no source, and that of trusted raters is not limited; nor is anybody's
before there are so many raters that each can have a share. All names that are used with one key are one rater here.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, or_, select, text, tuple_, update

from tuneloop.shared.experience import KEY_SOURCE, Rater, State, rater_of, voice_of
from tuneloop.shared.ledger.recording.reward_rule import without_quarantined
from tuneloop.shared.ledger.recording.rewards import rules_of, weighted_rewards
from tuneloop.shared.ledger.storage.database import portions
from tuneloop.shared.ledger.storage.schema import RATED, RaterState, experiences, feedback, raters
from tuneloop.shared.ledger.training.batch_policy import BatchPolicy

#: So many times the rows of a batch are looked through for others' rows. If that is not enough, what one rater has too
#: many of is dropped, so that others' rows beyond it are found.
WINDOW = 4

#: Why a row is dropped.
REASON = "its rater has more of the waiting feedback than feedback.max_rater_share lets into batches"

_TRAJECTORY = ("tenant", "task_id", "run_id")

#: The voters, by `voter_of`: other names of sources with a key are of raters of whom something was decided.
_IS_VOTER = or_(~raters.c.name.startswith(KEY_SOURCE), raters.c.name.like(f"{KEY_SOURCE}%/"))
_VOTERS = select(raters.c.tenant, raters.c.name).where(
    raters.c.state == RaterState.ACTIVE, raters.c.name != "", _IS_VOTER
)

#: The events by which it is seen who says more than others, the newest of all.
_NEWEST = select(feedback.c.tenant, feedback.c.source).where(text(RATED)).order_by(feedback.c.id.desc()).limit(4_000)

_REWARDING = update(experiences).where(experiences.c.id == bindparam("its_id")).values(reward=bindparam("its_reward"))


class Unit(NamedTuple):
    """Rows that are trained on together, by their ids: a row alone, or a group."""

    number: int
    rows: tuple[int, ...]


def is_limited(connection: Connection, policy: BatchPolicy) -> bool:
    """Whether there are so many raters that each can be held to its share."""
    if policy.max_rater_share >= 1:
        return False
    enough = _enough(policy)
    # As many as may turn out to be no voters are read besides.
    some = connection.execute(_VOTERS.limit(enough + len(policy.trusted_raters.named) + 1)).all()
    return len([row for row in some if tuple(row) not in policy.trusted_raters]) >= enough


def _enough(policy: BatchPolicy) -> int:
    """So many raters can each have a share."""
    return math.ceil(1 / policy.max_rater_share)


def within_shares(
    connection: Connection, units: Sequence[Unit], policy: BatchPolicy, size: int, *, held: Collection[int] = ()
) -> list[Unit]:
    """The first units, of `size` rows at least if there are so many, in which no rater has more than its share.

    The ids `held` are rows that the batch has already: they count as some of the `size`. A rater may have one unit
    whatever its size. If there are still not enough in a full window, the older half of the rest is dropped.
    """
    ids = [*held, *(row for unit in units for row in unit.rows)]
    shares = _Shares(_words(connection, ids, policy), policy, size)
    shares.hold(held)
    rest = shares.take(units)
    if shares.total < size and sum(len(unit.rows) for unit in units) >= WINDOW * size:
        ids = [row for unit in rest[: (len(rest) + 1) // 2] for row in unit.rows]
        for portion in portions(ids):
            dropped = {"state": State.DROPPED, "reason": REASON, "group_id": None}
            connection.execute(update(experiences).where(experiences.c.id.in_(portion)).values(dropped))
    return shares.taken


def count_held_rows(connection: Connection, units: Sequence[Unit], policy: BatchPolicy, size: int) -> dict[Rater, int]:
    """How many rows of the units each rater keeps out of a batch of `size`, if the batch is not full without them."""
    shares = _Shares(_words(connection, [row for unit in units for row in unit.rows], policy), policy, size)
    rest = shares.take(units)
    return {} if shares.total >= size else dict(shares.count_over(rest).most_common())


def weigh_rewards(connection: Connection, units: Sequence[Unit], policy: BatchPolicy) -> None:
    """Give the rows of a batch the rewards that they have when who rates more than others weighs less."""
    words = _words(connection, [row for unit in units for row in unit.rows], policy)
    apart = [row for row, by in words.items() if len(by) > 1 and min(by.values()) < 1]
    weights = {rater: weight for row in apart for rater, weight in words[row].items()}
    replies: set[str] = set()
    for portion in portions(apart):
        replies |= {*connection.execute(select(experiences.c.msg_id).where(experiences.c.id.in_(portion))).scalars()}
    found: dict[int, float | None] = {}
    for rule, msg_ids in rules_of(connection, replies).values():
        found |= weighted_rewards(connection, msg_ids, rule, policy.trusted_raters, weights)
    if rewards := [{"its_id": row, "its_reward": found[row]} for row in apart if found.get(row) is not None]:
        connection.execute(_REWARDING, rewards)


class _Shares:
    """What each rater has of a batch so far, in rows."""

    def __init__(self, words: Mapping[int, Mapping[Rater, float]], policy: BatchPolicy, size: int) -> None:
        self.taken: list[Unit] = []
        self.total = 0
        self._words, self._size = words, size
        self._most = policy.max_rater_share * size
        self._had: dict[Rater, float] = defaultdict(float)

    def count_over(self, units: Sequence[Unit]) -> Counter[Rater]:
        """How many rows of these units each rater keeps out that has its share."""
        rows: Counter[Rater] = Counter()
        for unit in units:
            rows.update(dict.fromkeys(self._over(_parts(self._words, unit)), len(unit.rows)))
        return rows

    def hold(self, ids: Collection[int]) -> None:
        """Count rows that the batch has already."""
        for id_ in ids:
            self._count(Unit(id_, (id_,)))

    def take(self, units: Sequence[Unit]) -> list[Unit]:
        """Take units until the batch is full; those that would give a rater too much."""
        rest = []
        for unit in units:
            if self.total >= self._size:
                break
            if self._over(_parts(self._words, unit)):
                rest.append(unit)
            else:
                self._count(unit)
                self.taken.append(unit)
        return rest

    def _over(self, parts: Mapping[Rater, float]) -> set[Rater]:
        """Who would have too much with a unit that has these parts."""
        return {rater for rater, part in parts.items() if self._had[rater] and self._had[rater] + part > self._most}

    def _count(self, unit: Unit) -> None:
        for rater, part in _parts(self._words, unit).items():
            self._had[rater] += part
        self.total += len(unit.rows)


def main_raters(connection: Connection, units: Sequence[Unit], policy: BatchPolicy) -> dict[int, Rater | None]:
    """By the number of each unit, the rater whose it is: of several the one who has the fewest; None if nobody limited.

    So who rates all that others rate, too, is not the one whose share they come out of.
    """
    words = _words(connection, [row for unit in units for row in unit.rows], policy)
    parts = {unit.number: _parts(words, unit) for unit in units}
    has: dict[Rater, float] = defaultdict(float)
    for found in parts.values():
        for rater, part in found.items():
            has[rater] += part
    return {number: min(found, key=lambda rater: (has[rater], rater), default=None) for number, found in parts.items()}


def _parts(words: Mapping[int, Mapping[Rater, float]], unit: Unit) -> dict[Rater, float]:
    """How much of a unit is each rater's word, in rows: that of trusted ones is nobody's."""
    parts: dict[Rater, float] = defaultdict(float)
    for row in unit.rows:
        by = words.get(row, {})
        for rater, weight in by.items():
            parts[rater] += weight / sum(by.values())
    return parts


def _words(connection: Connection, ids: Collection[int], policy: BatchPolicy) -> dict[int, dict[Rater, float]]:
    """Whose feedback counts for the reward of each of the rows, and how much each of them weighs.

    Of nobody's word but a trusted rater's, where one spoke.
    """
    names = select(*(experiences.c[name] for name in ("id", "msg_id", *_TRAJECTORY)))
    rows = [row for some in portions(ids) for row in connection.execute(names.where(experiences.c.id.in_(some)))]
    columns = select(*(feedback.c[name] for name in ("msg_id", *_TRAJECTORY, "source"))).distinct()
    events: list[Any] = []
    for some in portions({row.msg_id for row in rows}):
        events += connection.execute(columns.where(feedback.c.msg_id.in_(some)))
    runs = {(row.tenant, row.task_id, row.run_id) for row in rows if None not in (row.task_id, row.run_id)}
    named = tuple_(*(feedback.c[name] for name in _TRAJECTORY))
    for few in portions(runs, of=3):
        events += connection.execute(columns.where(feedback.c.msg_id.is_(None), named.in_(few)))
    by_target: dict[object, set[Rater]] = defaultdict(set)
    for event in without_quarantined(connection, events):
        by_target[event.msg_id or (event.tenant, event.task_id, event.run_id)].add(rater_of(event))
    weigh = _weights(connection, policy)
    found = {}
    for row in rows:
        said_by = by_target[row.msg_id] | by_target[row.tenant, row.task_id, row.run_id]
        is_settled = any(rater in policy.trusted_raters for rater in said_by)
        voters = set() if is_settled else {_voice(rater) for rater in said_by}
        found[row.id] = {voter: weigh(voter) for voter in voters}
    return found


def _weights(connection: Connection, policy: BatchPolicy) -> Callable[[Rater], float]:
    """How much each voice weighs, from 0 to 1: less, in proportion, the more or the less it says than most.

    Most: the median, in the newest feedback of its tenant, of the voices that spoke more than once, or where these are
    few of all. So who rates every reply counts like who rates as many as others, and names that are used once do not
    outvote those who stay.
    """
    counts: dict[str, Counter[Rater]] = defaultdict(Counter)
    for tenant, source in connection.execute(_NEWEST):
        if (tenant, source or "") not in policy.trusted_raters:
            counts[tenant][_voice((tenant, source or ""))] += 1
    middles = {}
    for tenant, counted in counts.items():
        staying = [count for count in counted.values() if count > 1]
        middles[tenant] = median(staying if len(staying) >= _enough(policy) else counted.values())

    def weigh(voice: Rater) -> float:
        middle, count = middles.get(voice[0], 1), max(counts[voice[0]][voice], 1)
        return min(middle / count, count / middle)

    return weigh


def _voice(rater: Rater) -> Rater:
    return rater[0], voice_of(rater[1])
