"""Computes rewards from feedback and writes them, inside the transaction that recorded the feedback."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, bindparam, case, func, insert, or_, select, tuple_, update

from tuneloop.shared.experience import Kind, Outcome, Rater, State, TrustedRaters, rater_of, steady_clock, voice_of
from tuneloop.shared.ledger.recording.reward_rule import (
    OF_NO_FEEDBACK,
    RETRIED,
    Event,
    EventFate,
    Fate,
    Reward,
    counting_events,
    default_of,
    definition,
    fates,
    in_window,
    parts,
    reward_of,
    rewarding,
    rule_of,
    similarities,
    unfinished_among,
    without_quarantined,
)
from tuneloop.shared.ledger.storage.database import LedgerPart, Transactions, find, ignoring, is_among, portions
from tuneloop.shared.ledger.storage.schema import experiences, feedback, reward_rules
from tuneloop.shared.settings.feedback import RewardRule

#: States in which a row takes the reward of new feedback; those aside too, for they serve other ends.
OPEN = (State.RECORDED, State.REWARDED, State.COMMITTED, State.EXPIRED, State.DROPPED)

Trajectory = tuple[str, str, str]

TRAJECTORY = ("tenant", "task_id", "run_id")

#: So many of the newest events about a closed row are looked at, for whether they came too late.
_MAX_LATE = 100

#: From so many rows with the same values on, they have a statement of their own.
_MANY_ALIKE = 16

#: The new fields of a row that is repeated; what else it has is the same, but for how it is trained on.
_REPEATED = ("correction", "state", "reward", "reward_rule", "rewarded_at", "edit_similarity")
_OWN = {"id", "committed_at", "group_id", "lease_epoch", "lease_until", "trained_version", *_REPEATED}
_SAME = tuple(column for column in experiences.c if column.name not in _OWN)
_ANEW = (bindparam(f"its_{name}", type_=experiences.c[name].type).label(name) for name in _REPEATED)
_REPEATING = insert(experiences).from_select(
    [*(column.name for column in _SAME), *_REPEATED],
    select(*_SAME, *_ANEW).where(experiences.c.id == bindparam("its_id")),
)

#: What of an event can bear on a reward: of its text that is a label alone, which is short.
_READ = (
    *(column for column in feedback.c if column.name not in {"text", "occurred_at"}),
    case((feedback.c.kind == Kind.LABEL, feedback.c.text)).label("text"),
)
_NAMED = or_(is_among(feedback.c.msg_id, "replies"), is_among(feedback.c.other_msg_id, "replies"))
_RUN = tuple_(*(feedback.c[name] for name in TRAJECTORY))
_ABOUT_REPLIES = select(*_READ).where(_NAMED)
_ABOUT_RUNS = select(*_READ).where(feedback.c.msg_id.is_(None), is_among(_RUN, "runs"))


class RewardRow(NamedTuple):
    id: int
    msg_id: str
    choice: int
    correction: int
    tenant: str
    task_id: str | None
    run_id: str | None
    state: str
    reward: float | None
    rewarded_at: float | None
    sampled_at: float
    committed_at: float | None
    group_id: int | None
    edit_similarity: float | None
    reason: str | None


_OF_REPLIES = select(*(experiences.c[name] for name in RewardRow._fields)).where(
    is_among(experiences.c.msg_id, "replies")
)
_OF_RUNS = (
    select(experiences.c.msg_id)
    .distinct()
    .where(experiences.c.task_id.is_not(None), is_among(tuple_(*(experiences.c[name] for name in TRAJECTORY)), "runs"))
)
_UNLOCKED_ROWS = _OF_REPLIES.order_by(experiences.c.id)
_ROWS = _UNLOCKED_ROWS.with_for_update()


class Change(NamedTuple):
    """A row, its reward by its feedback (None: it has none any more), and how alike it and its edited answer are."""

    row: RewardRow
    reward: Reward | None
    similarity: float | None = None


class Plan(NamedTuple):
    """What feedback changes: labels, rewards, trained rows to repeat, outcomes; and what was `read` for it."""

    labels: list[RewardRow]
    changes: list[Change]
    repeats: list[Change]
    outcomes: dict[int, Outcome]
    read: list[tuple[list[RewardRow], "RowEvents"]]

    def __bool__(self) -> bool:
        return any(self[:-1])


def plan(
    connection: Connection, msg_ids: Collection[str], rule: RewardRule, *, trusted: TrustedRaters, now: float
) -> Plan:
    decided = Plan([], [], [], {}, [])
    for portion in portions(msg_ids):
        found, rows, events = _read(connection, portion, trusted)
        decided.read.append((rows, events))
        decided.labels.extend(after for before, after in zip(found, rows, strict=True) if after != before)
        rewards = {row.id: events.reward(rule, row) for row in rows}
        edits = {id_: each.edit for id_, each in rewards.items() if each is not None and each.edit is not None}
        alike = similarities(connection, edits)
        for row in rows:
            reward, similarity = rewards[row.id], alike.get(row.id)
            if reward is None and not in_window(rule, sampled_at=row.sampled_at, received_at=now):
                reward = default_of(rule, sampled_at=row.sampled_at)
            before = row.reward, row.rewarded_at, row.edit_similarity
            if row.state in OPEN and before != (*(reward or (None, None))[:2], similarity):
                decided.changes.append(Change(row, reward, similarity))
        outcomes = dict(_outcomes(rule, rows, events))
        decided.outcomes.update(outcomes)
        repeats = _repeats(rule, rows, events, outcomes)
        decided.repeats.extend(each._replace(similarity=alike.get(each.row.id)) for each in repeats)
    return decided


def weighted_rewards(
    connection: Connection,
    msg_ids: Collection[str],
    rule: RewardRule,
    trusted: TrustedRaters,
    weights: Mapping[Rater, float],
) -> dict[int, float | None]:
    """The rewards of these replies' rows, by the rows' ids, where the feedback of some voters weighs less than 1."""
    found = {}
    for portion in portions(msg_ids):
        _, rows, events = _read(connection, portion, trusted, weights=weights)
        for row in rows:
            reward = events.reward(rule, row)
            found[row.id] = None if reward is None else reward.value
    return found


class FeedbackHistory(NamedTuple):
    """The feedback about a row, event by event, what each metric adds to its reward, and the reward that this makes."""

    events: list[tuple[Any, EventFate]]
    parts: dict[tuple[str, bool], float]
    reward: float | None


def read_history(
    connection: Connection, msg_id: str, rule_of_row: Callable[[int], RewardRule], trusted: TrustedRaters
) -> dict[int, FeedbackHistory]:
    """The feedback about each row of a reply; one that is leased or trained has the reward of events by then."""
    _, rows, events = _read(connection, [msg_id], trusted, _UNLOCKED_ROWS)
    found = {}
    for row in rows:
        rule, mine = rule_of_row(row.id), [event for event in events.all if bears_on(event, row)]
        came = sorted((event.id for event in mine), reverse=True)
        for end in (math.inf, *came[:_MAX_LATE], math.inf):
            heard = [event for event in events.all if event.id < end]
            bearing = [event for event in heard if event.id in events.bearing]
            about = RowEvents(heard, bearing, trusted, {}, events.unfinished).about(row)
            reward = reward_of(rule, about, sampled_at=row.sampled_at)
            made = reward or default_of(rule, sampled_at=row.sampled_at)
            if row.state in OPEN or (made and made[:2] == (row.reward, row.rewarded_at)):
                break
        known, retracted = fates(rule, about, sampled_at=row.sampled_at), {*retracted_preferences(heard)}
        for event in mine:
            if event.id not in known:
                left = Fate.RETRACTED if event.id in retracted else Fate.LATE
                known[event.id] = EventFate(left if event.id in events.bearing else Fate.QUARANTINED)
        counting = counting_events(rule, about, sampled_at=row.sampled_at)
        said = [(event, known[event.id]) for event in mine]
        found[row.id] = FeedbackHistory(said, parts(rule, counting), reward and reward.value)
    return found


def write(connection: Connection, decided: Plan, rule_id: int, *, repeat: bool) -> None:
    """Apply a plan; with `repeat`, trained rows are repeated with their later reward."""
    labels = [{"its_id": row.id, "task_id": row.task_id, "run_id": row.run_id} for row in decided.labels]
    _set(connection, experiences, labels)
    after: list[dict[str, object]] = []
    for row, reward, similarity in decided.changes:
        group_id = None if _is_unrated(reward) else row.group_id
        values = {"its_id": row.id, "state": row.state, "committed_at": row.committed_at, "group_id": group_id}
        values |= {"edit_similarity": similarity, "reward": None, "rewarded_at": None, "reward_rule": None}
        if reward is not None:
            values |= {"reward": reward.value, "rewarded_at": reward.at, "reward_rule": rule_id}
            values |= {"state": State.REWARDED} if row.state == State.RECORDED else {}
        elif row.state in (State.REWARDED, State.COMMITTED):
            values |= {"state": State.RECORDED, "committed_at": None, "group_id": None}
        after.append(values)
    _set(connection, experiences, after)
    _set(
        connection, feedback, [{"its_id": id_, "outcome": outcome} for id_, outcome in sorted(decided.outcomes.items())]
    )
    # What is left of a group may be a lone member: let it be gathered again.
    for portion in portions({each.row.group_id for each in decided.changes if _is_unrated(each.reward)} - {None}):
        of_these = and_(experiences.c.group_id.in_(portion), experiences.c.state == State.COMMITTED)
        connection.execute(update(experiences).where(of_these).values(group_id=None))
    if repeat and decided.repeats:
        # Their tokens once more, under their present rewards.
        again = []
        for row, reward, similarity in decided.repeats:
            assert reward is not None
            anew = (row.correction + 1, State.REWARDED, reward.value, rule_id, reward.at, similarity)
            values = {f"its_{name}": value for name, value in zip(_REPEATED, anew, strict=True)}
            again.append({"its_id": row.id, **values})
        connection.execute(_REPEATING, again)


def _is_unrated(reward: Reward | None) -> bool:
    return reward is None or reward.value is None


def replies_of(connection: Connection, trajectories: Collection[Trajectory]) -> Iterator[str]:
    for portion in portions(trajectories, of=3):
        yield from connection.execute(_OF_RUNS, {"runs": portion}).scalars()


def replies_preferred_to(connection: Connection, msg_ids: Collection[str]) -> Iterator[str]:
    preferred = select(feedback.c.other_msg_id).where(feedback.c.other_msg_id.is_not(None))
    yield from (row.other_msg_id for row in find(connection.execute, preferred, feedback.c.msg_id, msg_ids))


def _read(
    connection: Connection,
    msg_ids: Sequence[str],
    trusted: TrustedRaters,
    query: Any = _ROWS,
    weights: Mapping[Rater, float] = MappingProxyType({}),
) -> tuple[list[RewardRow], list[RewardRow], "RowEvents"]:
    """The rows of some replies, the same with the labels that feedback names, and the feedback about them."""
    named = {"replies": msg_ids}
    found = [RewardRow(*row) for row in connection.execute(query, named)]
    feedback_rows = [*connection.execute(_ABOUT_REPLIES, named)]
    feedback_rows += retractions(connection, {event.msg_id for event in feedback_rows if event.kind == Kind.PREFERENCE})
    bearing = without_quarantined(connection, feedback_rows)
    # The rows with the task and run that their feedback names, where their request named none.
    names: dict[tuple[str, str, str], str] = {}
    for event in sorted(bearing, key=lambda each: (each.received_at, each.id)):
        for label in ("task_id", "run_id"):
            if (name := getattr(event, label)) is not None and event.msg_id is not None:
                names.setdefault((event.tenant, event.msg_id, label), name)
    rows = [
        row._replace(
            task_id=names.get((row.tenant, row.msg_id, "task_id")) if row.task_id is None else row.task_id,
            run_id=names.get((row.tenant, row.msg_id, "run_id")) if row.run_id is None else row.run_id,
        )
        for row in found
    ]
    runs = {(row.tenant, row.task_id, row.run_id) for row in rows if None not in (row.task_id, row.run_id)}
    about_runs = [event for few in portions(runs, of=3) for event in connection.execute(_ABOUT_RUNS, {"runs": few})]
    bearing += without_quarantined(connection, about_runs)
    unfinished = unfinished_among(connection, {(each.tenant, each.task_id, each.run_id) for each in about_runs})
    return found, rows, RowEvents(feedback_rows + about_runs, bearing, trusted, weights, unfinished)


class RowEvents:
    """The feedback about some rows, each event once, in order; those not `bearing` on any row have an outcome too."""

    def __init__(
        self,
        events: Collection[Any],
        bearing: Collection[Any],
        trusted: TrustedRaters,
        weights: Mapping[Rater, float],
        unfinished: Collection[object] = (),
    ) -> None:
        self._trusted, self._weights, self.unfinished = trusted, weights, unfinished
        self.all = sorted({event.id: event for event in events}.values(), key=event_order)
        self._rewards: dict[object, Reward | None] = {}
        self._by_key: dict[object, list[Event]] = {}
        self._made: dict[tuple[int, bool], Event] = {}
        self._by_target: dict[object, list[Any]] = defaultdict(list)
        self.bearing = {event.id for event in bearing}
        numbers = self.bearing - {*retracted_preferences(self.all)}
        for event in self.all:
            if event.id not in numbers:
                continue
            for target in {*_targets(event)}:
                self._by_target[target].append(event)

    def reward(self, rule: RewardRule, row: RewardRow) -> Reward | None:
        """What the events make of one row; computed once for all rows with the same feedback."""
        same = (self._key(row), rule.attribution_window and row.sampled_at)
        if same not in self._rewards:
            self._rewards[same] = reward_of(rule, self.about(row), sampled_at=row.sampled_at)
        return self._rewards[same]

    def about(self, row: RewardRow) -> Sequence[Event]:
        if (key := self._key(row)) not in self._by_key:
            targets = _targets_of(row)
            found = {event.id: event for target in targets for event in self._by_target.get(target, ())}
            self._by_key[key] = []
            for event in sorted(found.values(), key=event_order):
                if not bears_on(event, row):
                    continue
                made = event.id, _is_about(event, row)  # once for all rows
                if made not in self._made:
                    content = (Kind(event.kind), event.metric, event.value, event.text, event.source)
                    whose = (event.call_id, rater_of(event) in self._trusted)
                    weight = self._weights.get((event.tenant, voice_of(event.source or "")), 1.0)
                    bearing = (made[1], event.received_at, *whose, event.msg_id is None)
                    again = event.repeated_at
                    run = (event.tenant, event.task_id, event.run_id) if event.msg_id is None else None
                    about: dict[str, Any] = {"repeated_at": again, "unfinished": run in self.unfinished}
                    self._made[made] = Event(event.id, *content, *bearing, weight=weight, **about)
                self._by_key[key].append(self._made[made])
        return self._by_key[key]

    def _key(self, row: RewardRow) -> object:
        """The same for rows of which the same was said: choices of a reply, replies of a run."""
        return row.tenant, *(target for target in _targets_of(row) if target in self._by_target)


def retracted_preferences(events: Sequence[Any]) -> Iterator[int]:
    """The retracted preferences: they do not count for the rejected reply either."""
    preferences: dict[object, list[Any]] = defaultdict(list)
    for event in events:
        thing = (event.tenant, event.msg_id, event.metric, event.source)
        if event.kind == Kind.PREFERENCE:
            preferences[thing].append(event)
        elif event.kind == Kind.RETRACTION:
            yield from (each.id for each in preferences[thing] if event.choice in (None, each.choice))


def event_order(event: Any) -> tuple[float, int]:
    """When each was last said by the ledger's time, then by id: what comes in late has its place all the same."""
    return max(event.received_at, event.repeated_at or event.received_at), event.id


def _targets(event: Any) -> Iterator[object]:
    if event.msg_id is None:
        yield event.tenant, event.task_id, event.run_id
        return
    yield event.msg_id, event.choice
    if event.other_msg_id is not None:
        yield event.other_msg_id, event.other_choice


def _targets_of(row: RewardRow) -> tuple[object, ...]:
    run_id = None if row.reason == RETRIED else row.run_id
    return (row.msg_id, None), (row.msg_id, row.choice), (row.tenant, row.task_id, run_id)


def _is_about(event: Any, row: RewardRow) -> bool:
    if event.msg_id is None:
        return (event.tenant, event.task_id, event.run_id) == _targets_of(row)[2]
    return event.msg_id == row.msg_id and event.choice in (None, row.choice)


def bears_on(event: Any, row: RewardRow) -> bool:
    against = event.other_msg_id == row.msg_id and event.other_choice in (None, row.choice)
    return event.tenant == row.tenant and (against or _is_about(event, row))


def retractions(connection: Connection, msg_ids: Collection[str]) -> Iterator[Any]:
    those = select(*_READ).where(feedback.c.kind == Kind.RETRACTION)
    yield from find(connection.execute, those, feedback.c.msg_id, msg_ids)


def _set(connection: Connection, table: Any, rows: Sequence[Mapping[str, object]]) -> None:
    alike: dict[object, list[Mapping[str, object]]] = defaultdict(list)
    for row in rows:
        alike[tuple(value for name, value in row.items() if name != "its_id")].append(row)
    if single := [row for group in alike.values() if len(group) < _MANY_ALIKE for row in group]:
        connection.execute(_update_by_id(table), single)
    for group in alike.values():
        values = {name: value for name, value in group[0].items() if name != "its_id"}
        for portion in portions([row["its_id"] for row in group] if len(group) >= _MANY_ALIKE else []):
            connection.execute(_update_by_ids(table, tuple(values)), {"its_ids": portion, **values})


@cache
def _update_by_id(table: Any) -> Any:
    return update(table).where(table.c.id == bindparam("its_id"))


@cache
def _update_by_ids(table: Any, names: tuple[str, ...]) -> Any:
    return update(table).where(is_among(table.c.id, "its_ids")).values({name: bindparam(name) for name in names})


def _outcomes(rule: RewardRule, rows: Sequence[RewardRow], events: RowEvents) -> Iterator[tuple[int, Outcome]]:
    """The outcomes of events that waited for their reply, or came too late for a row that is open again."""
    waiting = [event for event in events.all if event.outcome in (Outcome.PENDING, Outcome.LATE)]
    by_target: dict[object, list[RewardRow]] = defaultdict(list)
    for row in newest_corrections(rows) if waiting else ():
        for target in _targets_of(row):
            by_target[target].append(row)
    strictest: dict[object, RewardRow | None] = {}
    for event in waiting:
        target = next(_targets(event))
        subject = event.tenant, target
        if subject not in strictest:
            about = (row for row in by_target[target] if event.tenant == row.tenant and _is_about(event, row))
            strictest[subject] = min(about, key=lambda row: (not _is_closed(row), row.sampled_at), default=None)
        if (narrow := strictest[subject]) is not None:
            outcome = Outcome.ACCEPTED if in_time_for(rule, event, narrow) else Outcome.LATE
            if outcome != event.outcome:
                yield event.id, outcome


def in_time_for(rule: RewardRule, event: Any, row: RewardRow) -> bool:
    """Whether an event about a row is heeded there, unless it is of no kind that could change a reward."""
    if not rewarding(event.kind):
        return True
    return not _is_closed(row) and in_window(rule, sampled_at=row.sampled_at, received_at=event.received_at)


def _is_closed(row: RewardRow) -> bool:
    return row.state not in OPEN or row.state == State.EXPIRED


def newest_corrections(rows: Iterable[RewardRow]) -> Collection[RewardRow]:
    return {(row.msg_id, row.choice): row for row in sorted(rows, key=lambda row: row.correction)}.values()


def _repeats(
    rule: RewardRule, rows: Sequence[RewardRow], events: RowEvents, outcomes: Mapping[int, Outcome]
) -> Iterator[Change]:
    """Trained replies to which feedback that came too late gives another reward, or, unrated, another edited answer."""
    late = {event.id for event in events.all if outcomes.get(event.id, event.outcome) == Outcome.LATE}
    trained = [row for row in newest_corrections(rows) if row.state == State.TRAINED] if late else []
    for row in trained:
        reward = events.reward(rule, row)
        edited_anew = reward is not None and reward.value is None and reward.at != row.rewarded_at
        changed = reward is not None and (reward.value != row.reward or edited_anew)
        if changed and any(event.id in late and rewarding(event.kind) for event in events.about(row)):
            yield Change(row, reward)


class Rewards:
    def __init__(
        self,
        rule: RewardRule | None = None,
        *,
        trusted_raters: TrustedRaters | None = None,
        compensate_late: bool = False,
        clock: Callable[[], float] = steady_clock,
    ) -> None:
        self.rule = rule or RewardRule()
        self.trusted_raters = trusted_raters or TrustedRaters()
        self.compensate_late = compensate_late
        self._clock = clock

    def compute(self, connection: Connection, msg_ids: Collection[str]) -> Plan:
        """Let the feedback about these replies make their rewards, whichever of the two came first."""
        decided = self.plan(connection, msg_ids)
        if decided:
            write(connection, decided, self.rule_id(connection), repeat=self.compensate_late)
        return decided

    def compute_corrected(self, connection: Connection, msg_ids: Collection[str]) -> None:
        """Let replies that were corrected while leased take their rewards, each under the rule that made its reward."""
        # Those of the replies about which feedback came too late.
        late = feedback.c.outcome == Outcome.LATE
        found: set[str] = set()
        for portion in portions(msg_ids):
            about = or_(
                feedback.c.msg_id == experiences.c.msg_id,
                feedback.c.other_msg_id == experiences.c.msg_id,
                and_(feedback.c.msg_id.is_(None), *(feedback.c[name] == experiences.c[name] for name in TRAJECTORY)),
            )
            corrected = select(experiences.c.msg_id).where(
                experiences.c.msg_id.in_(portion), select(feedback.c.id).where(late, about).exists()
            )
            found |= set(connection.execute(corrected).scalars())
        for rule_id, (rule, replies) in rules_of(connection, found).items():
            decided = self.plan(connection, replies, rule)
            if decided:
                write(connection, decided, rule_id, repeat=self.compensate_late)

    def recompute(self, connection: Connection, msg_ids: Collection[str]) -> Plan:
        decided = self.plan(connection, msg_ids)
        write(connection, decided._replace(repeats=[]), self.rule_id(connection), repeat=False)
        return decided

    def plan(self, connection: Connection, msg_ids: Collection[str], rule: RewardRule | None = None) -> Plan:
        """The changes to these replies by all the feedback about them, under the rule given or else the present one."""
        return plan(connection, msg_ids, rule or self.rule, trusted=self.trusted_raters, now=self._clock())

    def rule_id(self, connection: Connection) -> int:
        return id_of_rule(connection, definition(self.rule), now=self._clock())

    def by_default(self, connection: Connection) -> tuple[ColumnElement[bool], dict[str, Any]] | None:
        """Which rows have had no feedback until their window closed, and what they get; None where they get nothing."""
        default, window = self.rule.default, self.rule.attribution_window
        if default is None or window is None:
            return None
        sampled_at = experiences.c.sampled_at
        closed = and_(experiences.c.state == State.RECORDED, sampled_at < self._clock() - window)
        given = {"reward": default, "rewarded_at": sampled_at + window, "reward_rule": self.rule_id(connection)}
        return closed, given | {"state": State.REWARDED}

    def release(self, connection: Connection, which: Any) -> None:
        """End leases. What was corrected meanwhile takes its reward now."""
        leased = select(experiences.c.id, experiences.c.msg_id).where(experiences.c.state == State.LEASED, which)
        rows = connection.execute(leased.order_by(experiences.c.id).with_for_update()).all()
        back = {"state": State.COMMITTED, "lease_epoch": None, "lease_until": None}
        for portion in portions([row.id for row in rows]):
            connection.execute(update(experiences).where(experiences.c.id.in_(portion)).values(back))
        self.compute_corrected(connection, {row.msg_id for row in rows})


_RULE_OF = select(reward_rules.c.id).where(reward_rules.c.definition == bindparam("its_definition"))


def id_of_rule(connection: Connection, definition: str, *, now: float) -> int:
    same = {"its_definition": definition}
    if (found := connection.execute(_RULE_OF, same).scalar()) is None:
        connection.execute(ignoring(connection, reward_rules), {"definition": definition, "created_at": now})
        found = connection.execute(_RULE_OF, same).scalar_one()
    return int(found)


def rules_of(connection: Connection, msg_ids: Collection[str]) -> dict[int, tuple[RewardRule, list[str]]]:
    """The rewarded replies by the rule of their rewards; those rewarded without feedback come under the newest rule."""
    by_rule: defaultdict[int, list[str]] = defaultdict(list)
    for portion in portions(msg_ids):
        query = select(experiences.c.msg_id, func.max(experiences.c.reward_rule)).group_by(experiences.c.msg_id)
        of_these = query.where(experiences.c.msg_id.in_(portion), experiences.c.reward_rule.is_not(None))
        for msg_id, rule in connection.execute(of_these):
            by_rule[rule].append(msg_id)
    if not by_rule:
        return {}
    definitions = {row.id: row.definition for row in connection.execute(select(reward_rules))}
    of_feedback = (number for number, definition in definitions.items() if definition not in OF_NO_FEEDBACK)
    newest = max(of_feedback, default=None)
    found: dict[int, tuple[RewardRule, list[str]]] = {}
    for number, replies in by_rule.items():
        chosen = newest if definitions[number] in OF_NO_FEEDBACK else number
        if chosen is not None:
            found.setdefault(chosen, (rule_of(definitions[chosen]), []))[1].extend(replies)
    return found


class RewardsPart(LedgerPart):
    """Verbs after which rewards may be others."""

    def __init__(self, transactions: Transactions, rewards: Rewards) -> None:
        super().__init__(transactions)
        self._rewards = rewards
