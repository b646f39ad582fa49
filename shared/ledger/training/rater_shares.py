"""No rater's word weighs more in a batch than its share: what is beyond it is not heard, or waits for others' feedback.

What a row's reward is made of is shared evenly by those who said it. The application's own word, which names no source,
and that of trusted raters is not limited; nor is anybody's before there are so many raters that each can have a share.
All names that are used with one key are one rater here.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, or_, select, tuple_, update

from tuneloop.shared.experience import KEY_SOURCE, State
from tuneloop.shared.ledger.raters import Rater, rater_of, voice_of, without_quarantined
from tuneloop.shared.ledger.recording.rewards import rewards_without, rules_of
from tuneloop.shared.ledger.storage.schema import RaterState, experiences, feedback, raters
from tuneloop.shared.ledger.storage.transactions import portions
from tuneloop.shared.ledger.training.batch_policy import BatchPolicy
from tuneloop.shared.settings.feedback import TrustedRaters

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

_REWARDING = update(experiences).where(experiences.c.id == bindparam("its_id")).values(reward=bindparam("its_reward"))


class Unit(NamedTuple):
    """Rows that are trained on together, by their ids: a row alone, or a group."""

    number: int
    rows: tuple[int, ...]


def is_limited(connection: Connection, policy: BatchPolicy) -> bool:
    """Whether there are so many raters that each can be held to its share."""
    if policy.max_rater_share >= 1:
        return False
    enough = math.ceil(1 / policy.max_rater_share)
    # As many as may turn out to be no voters are read besides.
    some = connection.execute(_VOTERS.limit(enough + len(policy.trusted_raters.named) + 1)).all()
    return len([row for row in some if tuple(row) not in policy.trusted_raters]) >= enough


class LimitedUnits(NamedTuple):
    """Units for a batch, and by its id the reward of each row of which not all who rated it are heard."""

    units: list[Unit]
    rewards: dict[int, float]


def within_shares(
    connection: Connection, units: Sequence[Unit], policy: BatchPolicy, size: int, *, held: Collection[int] = ()
) -> LimitedUnits:
    """The first units, of `size` rows at least if there are so many, in which no rater has more than its share.

    The ids `held` are rows that the batch has already: they count as some of the `size`. A rater may have one unit
    whatever its size. If there are not enough, those that others rated too are taken without the word of who has its
    share: nobody holds up others' replies by rating them as well. If there are still not enough in a full window, the
    older half of the rest is dropped.
    """
    shares = _Shares(_words(connection, [*held, *(row for unit in units for row in unit.rows)]), policy, size)
    shares.hold(held)
    over = shares.take_whole(units)
    rest, rewards = shares.take_in_part(connection, over) if shares.total < size else ([], {})
    if shares.total < size and sum(len(unit.rows) for unit in units) >= WINDOW * size:
        ids = [row for unit in rest[: (len(rest) + 1) // 2] for row in unit.rows]
        for portion in portions(ids):
            dropped = {"state": State.DROPPED, "reason": REASON, "group_id": None}
            connection.execute(update(experiences).where(experiences.c.id.in_(portion)).values(dropped))
    return LimitedUnits(shares.taken, rewards)


def count_held_rows(connection: Connection, units: Sequence[Unit], policy: BatchPolicy, size: int) -> dict[Rater, int]:
    """How many rows of the units each rater keeps out of a batch of `size`, if the batch is not full without them."""
    shares = _Shares(_words(connection, [row for unit in units for row in unit.rows]), policy, size)
    rest = shares.take_audible(shares.take_whole(units))
    return {} if shares.total >= size else dict(shares.count_over(rest).most_common())


def write_rewards(connection: Connection, rewards: Mapping[int, float]) -> None:
    """Give rows of a batch the rewards that they have in it."""
    if rewards:
        connection.execute(_REWARDING, [{"its_id": row, "its_reward": reward} for row, reward in rewards.items()])


class _Shares:
    """What each rater has of a batch so far."""

    def __init__(self, words: Mapping[int, Collection[Rater]], policy: BatchPolicy, size: int) -> None:
        self.taken: list[Unit] = []
        self.total = 0
        self._words, self._trusted, self._size = words, policy.trusted_raters, size
        self._most = policy.max_rater_share * size
        self._had: dict[Rater, float] = defaultdict(float)

    def count_over(self, units: Sequence[Unit]) -> Counter[Rater]:
        """How many rows of these units each rater keeps out that has its share."""
        rows: Counter[Rater] = Counter()
        for unit in units:
            rows.update(dict.fromkeys(self._over(_of_unit(self._words, unit)), len(unit.rows)))
        return rows

    def hold(self, ids: Collection[int]) -> None:
        """Reckon with rows that the batch has already, of which who had its share may not have been heard."""
        for id_ in ids:
            unit = Unit(id_, (id_,))
            self._count(unit, self._audible(unit) or _of_unit(self._words, unit))

    def take_whole(self, units: Sequence[Unit]) -> list[Unit]:
        """Take units with all that was said of them; those that would give a rater too much."""
        over = []
        for unit in units:
            if self.total >= self._size:
                break
            words = _of_unit(self._words, unit)
            if self._over(words):
                over.append(unit)
            else:
                self._take(unit, words)
        return over

    def take_audible(self, units: Sequence[Unit]) -> list[Unit]:
        """Take units of which others said something, too; the rest."""
        rest = []
        for unit in units:
            if (words := self._audible(unit)) is None or self._over(words):
                rest.append(unit)
            else:
                self._take(unit, words)
        return rest

    def take_in_part(self, connection: Connection, units: Sequence[Unit]) -> tuple[list[Unit], dict[int, float]]:
        """Take units, of which those who have their share said nothing; those of which nothing is left then.

        And by the id of each row whose reward it changes, the new one.
        """
        audible = {unit: self._audible(unit) for unit in units}
        apart = {
            row: {*self._words[row]} - {*words} for each in audible.values() for row, words in (each or {}).items()
        }
        unheard = {row: raters for row, raters in apart.items() if raters}
        # The rewards of rows without what some raters say of them, each under the rule that made its reward.
        replies: set[str] = set()
        for portion in portions(unheard):
            replies |= {
                *connection.execute(select(experiences.c.msg_id).where(experiences.c.id.in_(portion))).scalars()
            }
        found: dict[int, float | None] = {}
        for rule, msg_ids in rules_of(connection, replies).values():
            found |= rewards_without(connection, unheard, msg_ids, rule, self._trusted)
        rewards = found
        rest, changed = list[Unit](), dict[int, float]()
        for unit in units:
            # Meanwhile others may have got their share.
            words = None if self.total >= self._size else audible[unit]
            parted = [row for row in words or () if apart[row]]
            values = {row: reward for row in parted if (reward := rewards.get(row)) is not None}
            if words is None or self._over(words) or len(values) < len(parted):
                rest.append(unit)
                continue
            self._take(unit, words)
            changed |= values
        return rest, changed

    def _audible(self, unit: Unit) -> dict[int, Collection[Rater]] | None:
        """Who is heard of each row of a unit, without those that have their share; None if nobody is of one."""
        words = _of_unit(self._words, unit)
        while over := self._over(words):
            words = {
                row: [rater for rater in by if not (rater not in self._trusted and _voice(rater) in over)]
                for row, by in words.items()
            }
            if any(self._words.get(row) and not by for row, by in words.items()):
                return None
        return words

    def _over(self, words: Mapping[int, Collection[Rater]]) -> set[Rater]:
        """Who would have too much with a unit of which this was said."""
        parts = _parts(words, self._trusted)
        return {rater for rater, part in parts.items() if self._had[rater] and self._had[rater] + part > self._most}

    def _take(self, unit: Unit, words: Mapping[int, Collection[Rater]]) -> None:
        self._count(unit, words)
        self.taken.append(unit)

    def _count(self, unit: Unit, words: Mapping[int, Collection[Rater]]) -> None:
        for rater, part in _parts(words, self._trusted).items():
            self._had[rater] += part
        self.total += len(unit.rows)


def _voice(rater: Rater) -> Rater:
    return rater[0], voice_of(rater[1])


def main_raters(connection: Connection, units: Sequence[Unit], policy: BatchPolicy) -> dict[int, Rater | None]:
    """By the number of each unit, the rater whose it is: of several the one who has the fewest; None if nobody limited.

    So who rates all that others rate, too, is not the one whose share they come out of.
    """
    words = _words(connection, [row for unit in units for row in unit.rows])
    parts = {unit.number: _parts(_of_unit(words, unit), policy.trusted_raters) for unit in units}
    has: dict[Rater, float] = defaultdict(float)
    for found in parts.values():
        for rater, part in found.items():
            has[rater] += part
    return {number: min(found, key=lambda rater: (has[rater], rater), default=None) for number, found in parts.items()}


def _of_unit(words: Mapping[int, Collection[Rater]], unit: Unit) -> dict[int, Collection[Rater]]:
    return {row: words.get(row, ()) for row in unit.rows}


def _parts(words: Mapping[int, Collection[Rater]], trusted: TrustedRaters) -> dict[Rater, float]:
    """How much of a unit is each rater's word, in rows."""
    parts: dict[Rater, float] = defaultdict(float)
    for by in words.values():
        for rater in by:
            if rater not in trusted:
                parts[_voice(rater)] += 1 / len(by)
    return parts


def _words(connection: Connection, ids: Collection[int]) -> dict[int, set[Rater]]:
    """Whose feedback counts for the reward of each of the rows."""
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
    return {row.id: by_target[row.msg_id] | by_target[row.tenant, row.task_id, row.run_id] for row in rows}
