"""What became of the feedback in a group of records, reckoned from what its transaction has read."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, func, or_, select, text

from tuneloop.shared.experience import Feedback, Kind, Outcome, State, minted_at
from tuneloop.shared.ledger.recording.new_feedback import TakenFeedback
from tuneloop.shared.ledger.recording.reward_rule import counting_events
from tuneloop.shared.ledger.recording.rewards import OPEN, Plan, RewardRow, RowEvents, in_time_for, newest_corrections
from tuneloop.shared.ledger.storage.database import is_among, portions
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.settings.feedback import RewardRule

#: The choices of a reply or run that are told apart.
MAX_TOLD = 1000

#: Late events of a group whose choices are told apart, and events about runs whose replies are told.
_MOST_APART = _MOST_OF_RUNS = 100

#: Of the replies of a larger group it is not said whether they will be trained on.
_MAX_EXPLAINED = 1000

#: What a rule makes numbers of, if their metrics have a weight.
RATINGS = frozenset({Kind.NUMBER, Kind.BOOLEAN, Kind.LABEL, Kind.PREFERENCE})

_IS_DROPPED = and_(experiences.c.state == State.DROPPED, experiences.c.correction == 0)
_IS_UNFIT = and_(text("unsampled IS NOT NULL"), experiences.c.state.not_in((State.TRAINED, State.EXPIRED)))
_WHY = select(
    experiences.c.msg_id,
    experiences.c.choice,
    func.coalesce(experiences.c.reason, experiences.c.unsampled).label("why"),
).where(is_among(experiences.c.msg_id, "replies"))
_DROPPED, _DROPPED_OR_UNFIT = _WHY.where(_IS_DROPPED), _WHY.where(or_(_IS_DROPPED, _IS_UNFIT))


class FeedbackResults(msgspec.Struct, frozen=True):
    """What became of events, by their ids; `apart`: of the choices of a late one, where it is not the same for all.

    `not_trained` is why replies will not be trained on, by msg_id and choice. `of_runs`: the replies whose reward an
    event about their run makes. `of_calls`: the outcomes, by call_id, of events with the id of another call's.
    """

    outcomes: dict[str, Outcome] = {}
    apart: dict[str, dict[str, Outcome]] = {}
    not_trained: dict[str, dict[int, str]] = {}
    of_runs: dict[str, list[str]] = {}
    of_calls: dict[str, dict[str, Outcome]] = {}

    def of(self, events: Sequence[Feedback]) -> "FeedbackResults":
        """What these results say of some events."""
        found, replies = FeedbackResults(), {event.msg_id for event in events}
        for event in events:
            if (id_ := event.event_id) in self.outcomes:
                found.outcomes[id_] = self.of_calls.get(event.call_id, {}).get(id_, self.outcomes[id_])
        found.apart.update((id_, each) for id_, each in self.apart.items() if id_ in found.outcomes)
        found.of_runs.update((id_, each) for id_, each in self.of_runs.items() if id_ in found.outcomes)
        found.not_trained.update((name, each) for name, each in self.not_trained.items() if name in replies)
        return found


#: Rows, and the events about them, by what they are of: a reply, or a run.
_Rows = defaultdict[object, list[tuple[RewardRow, RowEvents]]]


def rated_runs(events: Sequence[Feedback]) -> list[Feedback]:
    """The events about runs whose replies are told."""
    of_runs = (each for each in events if each.msg_id is None and each.kind in RATINGS)
    return list(islice(of_runs, _MOST_OF_RUNS))


def results_of(
    connection: Connection,
    events: Sequence[Feedback],
    taken: TakenFeedback,
    decided: Plan,
    rule: RewardRule,
    *,
    dropped: Mapping[str, Outcome],
    restored_at: float | None,
    any_reply: bool,
) -> FeedbackResults:
    """What became of the events of a group, for whose replies and runs the plan is.

    `dropped`: the outcomes of events that were refused first. `restored_at`: when the ledger was put back.
    """
    results = FeedbackResults()
    if not events:
        return results
    for event, outcome in zip(events, _outcomes(events, taken, decided, dropped, restored_at or 0.0), strict=True):
        if results.outcomes.setdefault(event.event_id, outcome) is not outcome:
            results.of_calls.setdefault(event.call_id, {})[event.event_id] = outcome
    rows: _Rows = defaultdict(list)
    for found, heard in decided.read:
        for row in found:
            rows[row.tenant, row.msg_id].append((row, heard))
            rows[row.tenant, row.task_id, row.run_id].append((row, heard))
    late = (each for each in taken.new.values() if each.choice is None and results.outcomes[each.event_id] == "late")
    for event in islice(late, _MOST_APART):
        about = (event.tenant, event.msg_id) if event.msg_id else (event.tenant, event.task_id, event.run_id)
        choices = {
            f"{row.msg_id}:{row.choice}": Outcome.ACCEPTED if in_time_for(rule, event, row) else Outcome.LATE
            for row in newest_corrections(row for row, _ in rows[about][:MAX_TOLD])
        }
        if len({*choices.values()}) > 1:
            results.apart[event.event_id] = choices
    told_runs = [each for each in rated_runs(events) if results.outcomes[each.event_id] is not Outcome.PENDING]
    results.of_runs.update(_replies_decided_by(told_runs, rows, rule))
    there = {each.msg_id for each in events if results.outcomes[each.event_id] is not Outcome.PENDING} - {None}
    for portion in portions(there if len(there) <= _MAX_EXPLAINED else ()):
        for why in connection.execute(_DROPPED if any_reply else _DROPPED_OR_UNFIT, {"replies": portion}):
            results.not_trained.setdefault(why.msg_id, {})[why.choice] = why.why
    return results


def _replies_decided_by(events: Sequence[Feedback], rows: _Rows, rule: RewardRule) -> Iterator[tuple[str, list[str]]]:
    """The replies whose reward each of these events makes, alone or with others."""
    counting: dict[int, set[object]] = {}
    for event in events:
        made: dict[str, None] = {}
        for row, heard in rows[event.tenant, event.task_id, event.run_id][:MAX_TOLD]:
            if row.id not in counting:
                said = counting_events(rule, heard.about(row), sampled_at=row.sampled_at) if row.state in OPEN else ()
                counting[row.id] = {(each.metric, each.source) for each, _ in said if each.of_run}
            if (event.metric, event.source) in counting[row.id]:
                made[row.msg_id] = None
        yield event.event_id, list(made)


def _outcomes(
    events: Sequence[Feedback],
    taken: TakenFeedback,
    decided: Plan,
    dropped: Mapping[str, Outcome],
    restored_at: float,
) -> Iterator[Outcome]:
    there: dict[str, Any] = {}
    for _, heard in decided.read:
        there |= {each.event_id: decided.outcomes.get(each.id, each.outcome) for each in heard.all}
    for event in events:
        id_ = event.event_id
        stored = taken.new.get(id_) or taken.known.get(id_)
        if stored is None:
            yield Outcome.FULL if id_ in taken.full else dropped.get(id_, Outcome.DUPLICATE)
        elif stored.call_id != event.call_id:
            yield Outcome.DUPLICATE
        else:
            outcome = Outcome(there.get(id_, getattr(stored, "outcome", Outcome.PENDING)))
            with suppress(ValueError):
                # It waits in vain: a restored backup does not have its reply.
                if outcome is Outcome.PENDING and event.msg_id and minted_at(event.msg_id) < restored_at:
                    outcome = Outcome.UNKNOWN
            yield outcome
