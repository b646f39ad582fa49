"""Derives from facts what has stalled, why no training step runs, and the cure of each.

The rules behind `/health/ready`, `/training`, the gauges, the alarms and `tuneloop doctor`. A live process may still be
stuck, so each part reports its last progress. Pure: the caller supplies the facts.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple

from tuneloop.shared.experience import State
from tuneloop.shared.ledger.facts import ExplorerFacts, Facts, LedgerFacts, Standstill
from tuneloop.shared.ledger.training.automatic_commit import QUIET_S
from tuneloop.shared.logging import visible

#: Records that have waited in the outbox for so many seconds are stuck.
OUTBOX_WAITS_S = 60.0

#: What is asked for something and has not moved for so many seconds stands still: the alarm comes within a minute.
STILL_S = 40.0

#: The same of a disk that is to take a record, of the control process, which sends to its workers each second, and of
#: a judge, of which a slow one takes half a minute.
APPEND_S, CONTROL_S, JUDGE_S = 10.0, 15.0, 50.0

#: Who may open fewer files than this is about to refuse connections, and to lose its engines.
_FEW_DESCRIPTORS = 16

#: A version that nothing holds back is served within so many seconds.
VERSION_WAITS_S = 60.0

TRAINER_SILENT = "trainer_silent"

#: More untrainable replies than this for each trainable one are no client's choice.
_NEARLY_ALL = 20

#: What makes replies trainable, or recorded, that were not, behind their reason.
MARK_CURES = dict.fromkeys(
    ("sampling:top_p", "sampling:top_k", "sampling:min_p"),
    " (the engine did not return what was left: load tuneloop's plug-in into it, TUNELOOP_ENGINE_PACKS=1, and send no"
    " other parameter that changes samples, nor `logprobs`)",
) | {
    "no_token_ids": " (the engine returned no token ids)",
    "side_request": " (titles, summaries and the like in a run, which its reward does not reach)",
    "sampling:thinking_token_budget": " (the engine ended the reasoning: let the client set a larger budget, or none)",
    "store_false": " (by the request's own word; `tenants.NAME.store: always` keeps them)",
    "settings": " (by tenants.NAME.store or buffer.record_share)",
    "sampling:mask_too_large": " (too many tokens were left: send `top_k`, or a lower `top_p`)",
}

#: What to do about rows that were dropped for a reason with these words.
_DROP_CURES = dict.fromkeys(
    ("the same reward",),
    "reward the runs of a task differently, give harder or easier tasks, or raise buffer.group_size",
) | {
    "alone in its group": "see why its task's other runs have no reward, or raise buffer.group_timeout",
    "is below": "lower algorithm.sft.least_reward, or reward what is good above it",
}

_NAMED = 5

DISK_FULL = "disk_full"

#: The alarm that makes engines return all log-probabilities again: those that the trainer recomputes are others.
CAPTURE_MISMATCH = "capture_mismatch"

WAITING = (State.RECORDED, State.REWARDED, State.COMMITTED, State.LEASED)


class Code(StrEnum):
    """The reasons, in the order in which they are reported: what stops everything first, then by state."""

    DATABASE_AWAY = "database_away"
    DATABASE_REFUSES = "database_refuses"
    EXPLORER_SILENT = "explorer_silent"
    CONTROL_SILENT = "control_silent"
    DATABASE_SILENT = "database_silent"
    OUTBOX_STUCK = "outbox_stuck"
    ENGINE_STUCK = "engine_stuck"
    OPEN_FILES = "open_files"
    JUDGE_SILENT = "judge_silent"
    NOT_READY = "not_ready"
    STEPS_DONE = "steps_done"
    NO_TRAINER = "no_trainer"
    TRAINER_STUCK = "trainer_stuck"
    VERSIONS_REJECTED = "versions_rejected"
    DISK_FULL = "disk_full"
    LEASED = "leased"
    OUTBOX_NOT_DRAINED = "outbox_not_drained"
    NOTHING_RECORDED = "nothing_recorded"
    NOT_TRAINABLE = "not_trainable"
    NO_FEEDBACK = "no_feedback"
    NOT_COMMITTED = "not_committed"
    EDITS_NOT_LEARNT = "edits_not_learnt"
    ALL_EXPIRED = "all_expired"
    TOO_STALE = "too_stale"
    GROUPS_INCOMPLETE = "groups_incomplete"
    BATCH_NOT_FULL = "batch_not_full"
    RATER_SHARE = "rater_share"
    REJECTED_VERSIONS = "rejected_versions"
    VERSION_NOT_SERVED = "version_not_served"
    PROMOTION_HELD = "promotion_held"
    NOT_LEARNING = "not_learning"
    POLICY_REFUSED = "policy_refused"
    NONE = "none"


#: Those that are alarms too: of an explorer's parts that stand still, and of its trainer.
STOPS = (
    *(Code.DATABASE_REFUSES, Code.DATABASE_SILENT, Code.OUTBOX_STUCK, Code.ENGINE_STUCK),
    *(Code.OPEN_FILES, Code.JUDGE_SILENT),
)
OF_TRAINERS = (Code.TRAINER_STUCK, Code.VERSIONS_REJECTED)


class Reason(NamedTuple):
    code: Code
    sentence: str


def find_stops(facts: ExplorerFacts) -> tuple[Standstill, ...]:
    found = []
    if facts.control_s >= CONTROL_S:
        told = f"the control process has said nothing for {facts.control_s:.0f} s: it stands still. Workers answer, and"
        told += " what they acknowledge waits on disk; no version is loaded. Start the explorer again"
        found.append(Standstill(Code.CONTROL_SILENT, told, serves=False))
    if facts.refusal is not None:
        told = f"the database refuses what is recorded, which waits in the outbox: {facts.refusal}"
        found.append(Standstill(Code.DATABASE_REFUSES, told, serves=False))
    if facts.database_s >= STILL_S:
        told = f"the database has said nothing for {facts.database_s:.0f} s, and refused nothing: it stands still, a"
        told += " connection to it is half open, or a stopped process holds its lock. End that process, or start the"
        told += " database again; what is acknowledged waits in the outbox"
        found.append(Standstill(Code.DATABASE_SILENT, told))
    if facts.append_s >= APPEND_S:
        told = f"the disk of explorer.outbox_dir has not taken a record for {facts.append_s:.0f} s: see its device and"
        told += " its mount; nothing is acknowledged meanwhile"
        found.append(Standstill(Code.OUTBOX_STUCK, told, serves=False))
    still = [each for each in facts.engines if each.still_s >= STILL_S]
    for each in still:
        does = "has been loading weights" if each.loads else "has requests, and has made no step nor sent a byte"
        told = f"engine {each.number} {does} for {each.still_s:.0f} s: start it again, unless the explorer does,"
        told += " and see that its host is reached, by the name in DNS"
        found.append(Standstill(Code.ENGINE_STUCK, told, serves=len(still) < len(facts.engines)))
    if facts.descriptors is not None and facts.descriptors < _FEW_DESCRIPTORS:
        told = f"a process of the explorer can open {number(facts.descriptors, 'more file')}, and then no connection:"
        told += " raise its limit (`LimitNOFILE=` of systemd, `ulimit -n`), and start the explorer again"
        found.append(Standstill(Code.OPEN_FILES, told, serves=False))
    if facts.judge_s >= JUDGE_S:
        told = f"the judge has given no verdict for {facts.judge_s:.0f} s: start the model behind judge.url, or look at"
        told += " its key, its name in DNS and its limits; replies wait for their verdicts, and none is lost"
        found.append(Standstill(Code.JUDGE_SILENT, told))
    return tuple(found)


def why_not_ready(stops: Sequence[Standstill], *, has_engine: bool, storage: str | None) -> str | None:
    """Why an explorer should get no requests; None if it should. `storage` is why nothing can be kept."""
    if not has_engine:
        return "no engine is ready: see the explorer's log, and whether their hosts are reached, by their names in DNS"
    if storage is not None:
        return storage
    return next((stop.sentence for stop in stops if not stop.serves), None)


def find_silent_trainer(ledger: LedgerFacts, now: float) -> str | None:
    """The sentence about a trainer that was not seen any more, and has not said that it stops."""
    trainer = ledger.trainer
    if trainer is None or trainer.ended_at is not None or trainer.up(now):
        return None
    seen = f"trainer {trainer.name} was last seen at {moment(trainer.seen_at)}, {ago(now, trainer.seen_at)} ago"
    return f"{seen}: it is dead, stopped, or cut off from the database; look at its log, start it again"


def diagnose(facts: Facts) -> list[Reason]:
    reasons = [Reason(Code(stop.code), stop.sentence) for stop in facts.stops if stop.code != Code.DATABASE_REFUSES]
    outbox, ledger = facts.outbox, facts.ledger
    if outbox.refusal is not None:
        told = f"the database answers, but refuses what the outbox holds ({outbox.refusal}): let it; nothing"
        reasons.append(Reason(Code.DATABASE_REFUSES, f"{told} acknowledged is lost meanwhile"))
    elif outbox.since is not None and facts.now - outbox.since > OUTBOX_WAITS_S:
        told = f"{number(outbox.records, 'record')} of the outbox have waited for {ago(facts.now, outbox.since)}: an"
        told += " explorer on this machine puts them into the database; start one, or see in its log what keeps it"
        reasons.append(Reason(Code.OUTBOX_NOT_DRAINED, told))
    if ledger is None:
        away = "the database cannot be read: start it or correct its URL; what is acknowledged waits in the outbox"
        return [Reason(Code.DATABASE_AWAY, away), *reasons]
    reasons += _of_the_trainer(facts, ledger)
    full = next((alarm.reason for alarm in ledger.alarms if alarm.name == DISK_FULL), None)
    if facts.disk is not None:
        full = facts.disk.sentence if facts.disk.missing else None
    if full is not None:
        cure = "make room, or lower trainer.max_checkpoints_to_keep; the trainer waits for it and goes on by itself"
        reasons.append(Reason(Code.DISK_FULL, f"{full}: {cure}"))
    if not _busy(facts, ledger) or facts.rules.save_interval > 1:
        reasons += _of_the_batch(facts, ledger)
    reasons += _of_the_versions(facts, ledger)
    if not reasons:
        reasons.append(Reason(Code.NONE, "a full batch waits, and a trainer that lives is about to take it"))
    if ledger.edited:
        edits = number(ledger.edited, "committed edited answer")
        cure = "rate the replies too, or let algorithm_type: sft learn the answers"
        reasons.append(Reason(Code.EDITS_NOT_LEARNT, f"{edits}, of which {facts.rules.method} learns nothing: {cure}"))
    return sorted(reasons, key=lambda reason: list(Code).index(reason.code))


def equation(ledger: LedgerFacts) -> list[str]:
    counts = {state: ledger.count(state).rows for state in State}
    terms = " + ".join(f"{count} {state.value}" for state, count in counts.items())
    trained = f"{counts[State.TRAINED]} trained + {ledger.purged} purged"
    consumed = f"{ledger.consumed} consumed by {number(ledger.versions, 'version')}"
    sign = "=" if counts[State.TRAINED] + ledger.purged == ledger.consumed else "≠"
    return [f"{number(sum(counts.values()), 'experience')} = {terms}", f"{trained} {sign} {consumed}"]


def ago(now: float, then: float) -> str:
    seconds = max(0.0, now - then)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(then: float) -> str:
    return f"{datetime.fromtimestamp(then, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _of_the_trainer(facts: Facts, ledger: LedgerFacts) -> Iterator[Reason]:
    trainer, total = ledger.trainer, facts.rules.total_steps
    if total is not None and ledger.weights is not None and ledger.weights.step >= total:
        yield Reason(Code.STEPS_DONE, f"all {total} steps of trainer.total_steps are done: raise it to go on")
    elif trainer is None:
        yield Reason(Code.NO_TRAINER, "no trainer has ever started: `tuneloop run` one, with `mode: train` or `both`")
    elif trainer.ended_at is not None:
        stopped = (
            f"trainer {trainer.name} stopped at {moment(trainer.ended_at)}, {ago(facts.now, trainer.ended_at)} ago"
        )
        yield Reason(
            Code.NO_TRAINER, f"{stopped}: start it again; if it did not mean to stop, the end of its log says why"
        )
    elif (silent := find_silent_trainer(ledger, facts.now)) is not None:
        yield Reason(Code.NO_TRAINER, silent)
    named = {*OF_TRAINERS, Code.NOT_LEARNING, Code.POLICY_REFUSED}
    yield from (Reason(Code(alarm.name), alarm.reason) for alarm in ledger.alarms if alarm.name in named)
    if _busy(facts, ledger):
        since = "" if ledger.leased_since is None else f", for {ago(facts.now, ledger.leased_since)} at most"
        leased, size = ledger.count(State.LEASED).rows, facts.rules.batch_size
        interval = facts.rules.save_interval
        if total is not None and ledger.weights is not None:
            interval = min(interval, total - ledger.weights.step)
        told, wait = f"{number(leased, 'experience')} in training{since}", "wait, or see what the trainer logs"
        if interval > 1 and facts.rules.batch_timeout is not None:
            told += f", towards a version of {interval} steps"
        elif (missing := interval * size - leased - ledger.claimable) > 0 and interval > 1:
            told += f", {leased // size} of the {interval} steps to the next version"
            wait = f"it takes {missing} more experiences, rewarded and committed, or a lower trainer.save_interval"
        yield Reason(Code.LEASED, f"{told}: {wait}")


def _busy(facts: Facts, ledger: LedgerFacts) -> bool:
    return _up(facts, ledger) and ledger.count(State.LEASED).rows >= facts.rules.least


def _up(facts: Facts, ledger: LedgerFacts) -> bool:
    return ledger.trainer is not None and ledger.trainer.up(facts.now)


def _of_the_batch(facts: Facts, ledger: LedgerFacts) -> Iterator[Reason]:
    size, leased = facts.rules.least, ledger.count(State.LEASED).rows
    ready = ledger.claimable + (leased % size if _up(facts, ledger) else leased)
    if ready >= size:
        if ledger.held_back:
            told = [f"{visible(each.rater)} ({each.tenant}) {each.rows}" for each in ledger.held_back]
            more = f" and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
            yield Reason(
                Code.RATER_SHARE,
                "feedback.max_rater_share keeps experiences of these raters out of the next batch:"
                f" {', '.join(told[:_NAMED])}{more}. Let others give feedback too, name a source of your own in"
                " feedback.trusted_raters or send its feedback without a source, or raise the share",
            )
        return
    yield from _before_feedback(ledger, facts.rules.ignored_feedback)
    rewarded, expired = ledger.count(State.REWARDED).rows, ledger.count(State.EXPIRED).lately
    commit = "" if facts.rules.automatic else " and commit them"
    if rewarded:
        by = "POST /commit"
        if facts.rules.automatic:
            at = None if ledger.rewarded_since is None else ledger.rewarded_since + QUIET_S
            by = f"{when_committed(facts.rules.group_by, at, 'the first')}, and POST /commit hurries it"
        waits = f"{number(rewarded, 'experience')} with a reward or an edited answer, but not committed"
        yield Reason(Code.NOT_COMMITTED, f"{waits}: {by}")
    bounds = "trainer.max_staleness"
    if expired and not ledger.count(State.COMMITTED).rows + ledger.count(State.LEASED).rows:
        yield Reason(
            Code.ALL_EXPIRED,
            f"{number(expired, 'experience')} expired and none is left: commit sooner, or raise {bounds}",
        )
    if ledger.too_old:
        yield Reason(
            Code.TOO_STALE,
            f"{number(ledger.too_old, 'committed experience')} too old for the next batch, which lets them expire:"
            f" commit sooner, or raise {bounds}",
        )
    # Only a trainer finds out which of them are complete.
    if ledger.ungrouped and _up(facts, ledger):
        yield Reason(
            Code.GROUPS_INCOMPLETE,
            f"{_waits(ledger.ungrouped, 'committed experience')} until their {facts.rules.group_by} is complete:"
            f" give feedback on its other replies{commit}, or wait for buffer.group_timeout",
        )
    if ready:
        missing = f"a step takes {size}, {ready} can be had now"
        yield Reason(
            Code.BATCH_NOT_FULL,
            f"{missing}: give feedback on more replies{commit}, or lower buffer.train_batch_size",
        )


def _before_feedback(ledger: LedgerFacts, ignored_feedback: str | None) -> Iterator[Reason]:
    recorded, dropped = ledger.count(State.RECORDED).rows, ledger.count(State.DROPPED).lately + ledger.unsampled
    alive = sum(ledger.count(state).lately for state in WAITING) - ledger.unsampled
    in_progress = sum(ledger.count(state).rows for state in WAITING)
    if not in_progress and not any(count.lately for count in ledger.states.values()):
        since = "since the last that was trained on" if ledger.count(State.TRAINED).rows else "yet"
        yield Reason(
            Code.NOTHING_RECORDED, f"no experience was recorded {since}: send requests to /v1/chat/completions"
        )
    if dropped > _NEARLY_ALL * alive:
        reasons = [*ledger.unfit, *(each for each in ledger.drops if each.state is State.DROPPED)]
        most = max(reasons, key=lambda each: each.rows, default=None)
        unsampled = f" ({ledger.unsampled} are not samples of the policy)" if ledger.unsampled else ""
        told = "see what the clients ask for, and `reason` and `unsampled` in the table experiences"
        if most is not None:
            unsampled += f", most often: {most.reason}{MARK_CURES.get(most.reason, '')}"
            told = next((cure for words, cure in _DROP_CURES.items() if words in most.reason), told)
        yield Reason(
            Code.NOT_TRAINABLE,
            f"{dropped} of the last {number(dropped + alive, 'experience')} cannot be trained on{unsampled}: {told}",
        )
    if recorded == in_progress and recorded:
        pending = f"; {_waits(ledger.pending, 'event')} for a reply that is not recorded" if ledger.pending else ""
        yield Reason(
            Code.NO_FEEDBACK,
            f"{_waits(recorded, 'experience')} for a reward, none has one: POST /feedback on them{pending}"
            + (f"; {ignored_feedback}" if ignored_feedback else ""),
        )


def _of_the_versions(facts: Facts, ledger: LedgerFacts) -> Iterator[Reason]:
    weights = ledger.weights
    if weights is not None and weights.rejected >= 2:
        yield Reason(
            Code.REJECTED_VERSIONS,
            f"the newest {weights.rejected} versions were rejected, and their training with them ({weights.reason}):"
            " see the explorer's log",
        )
    holding = [f"{each.name} ({each.reason})" for each in ledger.alarms if each.holds and not each.policy]
    if holding and weights is not None and weights.servable > (weights.champion or 0):
        yield Reason(
            Code.PROMOTION_HELD,
            f"version {weights.servable} is made, and not served while these alarms are open: " + ", ".join(holding),
        )
    since = None if weights is None or facts.rules.gated else weights.waiting_since
    if since is not None and not holding and facts.now - since > VERSION_WAITS_S:
        told = f"a version has waited to be served for {ago(facts.now, since)}: see the explorer's alarms and log, and"
        yield Reason(Code.VERSION_NOT_SERVED, f"{told} that checkpoint_root_dir is the same folder there as here")


def when_committed(group_by: str, at: float | None, what: str = "it") -> str:
    """Say when a running explorer commits due rows by itself, with the time if it is known."""
    told = f"{what} is released by itself" + ("" if at is None else f" at {moment(at)}")
    if group_by != "none":
        whole = (
            "both replies of its preference have" if group_by == "preference" else f"all replies of its {group_by} have"
        )
        told += f" at the earliest, when {whole} a reward, or after buffer.group_timeout"
    return told


def number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _waits(count: int, noun: str) -> str:
    return f"{number(count, noun)} wait{'s' if count == 1 else ''}"
