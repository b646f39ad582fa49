"""The report of `tuneloop doctor`: whether the ledger balances, what waits where, and why no step is happening."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tuneloop.shared.capacity.pace import TrainerPace, find_pace
from tuneloop.shared.checkpoints import (
    DiskSpace,
    files_at,
    measure_space,
    newest_with_state,
    read_manifest,
    size_without_weights,
    stays,
)
from tuneloop.shared.errors import CheckpointRejected, EnvironmentRefused, LedgerError
from tuneloop.shared.evaluation.gate import evaluator_of, same_tasks
from tuneloop.shared.experience import Evaluator, State, VersionAction, VersionState
from tuneloop.shared.job_marks import require_restored
from tuneloop.shared.ledger.browsing.reply_pages import ReplyFilter
from tuneloop.shared.ledger.explorers import NOT_STORED, ExplorerStatus
from tuneloop.shared.ledger.facts import Facts, LedgerFacts, Rules
from tuneloop.shared.ledger.ledger import BatchRules, Ledger, Version
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.ledger.storage.clock import ClockSkew
from tuneloop.shared.ledger.versions.versions import SERVABLE, VersionEvent
from tuneloop.shared.operations.diagnosis import MARK_CURES, Reason, ago, diagnose, equation, moment, number
from tuneloop.shared.operations.engines import EngineSummary, plugin_sentence, read_explorer
from tuneloop.shared.operations.older_ledger import find_lost_versions
from tuneloop.shared.operations.outbox import read_outbox
from tuneloop.shared.outbox_status import OutboxStatus, files_of, outbox_status
from tuneloop.shared.settings.database_url import without_password
from tuneloop.shared.settings.settings import Settings

#: Where an explorer runs, a file of its outbox is removed within 70 minutes.
_SILENT_S = 7200.0

MAX_DROP_REASONS = 5

#: So many of the newest replies, and of a run's, are looked at for calls that do not merge.
_NEWEST_REPLIES = 200

WAITS_FOR = {
    State.RECORDED: "feedback",
    State.REWARDED: "a commit",
    State.COMMITTED: "a batch",
    State.LEASED: "its version",
}

_SERVED = (VersionState.CANDIDATE, VersionState.CANARY, VersionState.CHAMPION)

_HOW = {"pinned": "is pinned", "canary": "is the canary", "waits": "waits"}


class OpenVersion(NamedTuple):
    """A version that is `pinned`, serves as `canary` beside the champion, or `waits` to be served."""

    version: int
    how: str
    since: float
    why: str


class DoctorReport(NamedTuple):
    """The facts, a sentence for each sum of the ledger that does not balance, and why no training step runs.

    `open_versions`: the candidate, canary and pinned version. `lost_files`: files of versions that no engine can load.
    `older`: what is newer than the ledger. `unseen`: outbox files without an explorer for two hours. `restoring`: a
    restore is incomplete. `engines`: of the answering explorer, None without one. `pace`: recent, None with fewer than
    two versions. `explorers`: all known ones. `not_stored`: replies lost in a week. `unmerged`: why calls of the newest
    runs are not one sequence in training.
    """

    facts: Facts
    imbalance: list[str]
    reasons: list[Reason]
    open_versions: tuple[OpenVersion, ...]
    lost_files: tuple[str, ...] = ()
    older: str = ""
    unseen: tuple[str, ...] = ()
    restoring: str = ""
    engines: list[EngineSummary] | None = None
    clock: ClockSkew | None = None
    pace: TrainerPace | None = None
    explorers: tuple[ExplorerStatus, ...] = ()
    not_stored: Mapping[str, float] = MappingProxyType({})
    unmerged: str | None = None


def examine_experiment(settings: Settings, *, clock: Callable[[], float] | None = None) -> DoctorReport:
    """Look at ledger and outbox, and ask the explorer of its engines; nothing is changed."""
    schema, now = settings.buffer.trainer_input.experience_buffer.name, time.time()
    ledger, counts, disk, away, restoring = None, None, None, "", ""
    outbox: OutboxStatus | None = None
    report: dict[str, Any] = {"imbalance": [], "open_versions": ()}
    try:
        present, newest = revisions.current(settings.database_url, schema=schema), revisions.newest()
        if present is None:  # nothing has run yet
            counts, report["clock"] = LedgerFacts(states={}), ClockSkew(0.0, 0.0)
        elif present != newest:
            away = f"the database has the schema {present}, this release works with {newest}: `tuneloop db upgrade`"
        else:
            ledger = Ledger.of(settings)
            ledger.require_owner(settings.project, settings.name)
            batch_rules, least = BatchRules.of(settings), Rules.of(settings).least
            found = ledger.reports.facts(batch_rules, drops=MAX_DROP_REASONS, batch=least)
            now = ledger.transactions.time()
            report = {
                "imbalance": ledger.reports.audit(),
                "open_versions": find_open_versions(ledger, settings),
                "lost_files": tuple(find_lost_files(ledger)),
                "older": find_lost_versions(settings.job_dir, ledger) or "",
                "unseen": tuple(ledger.recording.unseen_files(files_of(settings.outbox_dir), _SILENT_S)),
                "explorers": tuple(ledger.explorers.all()),
                "not_stored": ledger.explorers.counts(NOT_STORED),
                "unmerged": find_unmerged(ledger),
                "clock": ClockSkew(time.time() - now, ledger.transactions.clock_skew()),
            }
            outbox = read_outbox(settings, ledger)
            counts, disk = found, _space(ledger, settings)
    except EnvironmentRefused as error:
        away = str(error)
    except LedgerError as error:
        away = f"cannot use the database {without_password(settings.database_url)}: {error}"
    finally:
        if ledger is not None:
            ledger.close()
    explorer = read_explorer(settings)
    facts = Facts(
        now=clock() if clock else now,
        rules=Rules.of(settings),
        outbox=outbox or outbox_status(settings.outbox_dir, {}),
        ledger=counts,
        away=away,
        disk=disk,
        stops=explorer.stops,
    )
    try:
        require_restored(settings.job_dir)
    except EnvironmentRefused as error:
        restoring = str(error)
    pace = find_pace(settings.job_dir, facts.now) if counts is not None else None
    return DoctorReport(
        facts, reasons=diagnose(facts), restoring=restoring, engines=explorer.engines, pace=pace, **report
    )


def find_unmerged(ledger: Ledger) -> str | None:
    """The share of the newest runs' calls that do not continue earlier ones, and the most frequent reason."""
    runs: dict[tuple[str, str, str], None] = {}
    for tenant in {tenant for tenant, _ in ledger.reports.newest_names(among=_NEWEST_REPLIES)}:
        rows = ledger.reply_pages.page(tenant, ReplyFilter(), after=None, limit=_NEWEST_REPLIES).rows
        runs |= {(tenant, row.task_id, row.run_id): None for row in rows if row.task_id and row.run_id}
    later, breaks, reasons, of_kind = 0, 0, Counter[str](), dict[str, str]()
    for run in runs:
        if later >= _NEWEST_REPLIES or not 1 < ledger.runs.count_calls(*run) <= _NEWEST_REPLIES:
            continue
        tokens = ledger.runs.count_tokens(*run)
        later, breaks = later + tokens.calls - 1, breaks + tokens.sequences - 1
        for sentence in ledger.runs.find_breaks(*run) if tokens.sequences > 1 else ():
            kind = re.sub(r"\d+", "", sentence)
            reasons[kind] += 1
            of_kind.setdefault(kind, sentence)
    if not reasons:
        return None
    most = of_kind[reasons.most_common(1)[0][0]]
    return f"{breaks} of {number(later, 'later call')} of runs do not continue those before; most often as here: {most}"


def find_lost_files(ledger: Ledger) -> Iterator[str]:
    """The files that are missing or cut of the versions that are served or wait, where their folder can be seen."""
    for version in ledger.versions.all():
        if version.version and version.state in _SERVED and version.path.parent.is_dir():
            try:
                for each in files_at(version.path, read_manifest(version.path)):
                    if (version.path / each.path).stat().st_size != each.size:
                        raise CheckpointRejected(f"{each.path} is cut")
            except (CheckpointRejected, OSError) as error:
                told = (
                    f"version {version.version} ({version.state}): {error}: no engine that starts can load it: put the"
                )
                yield f"{told} file back, or `tuneloop versions promote` another version"


def _space(ledger: Ledger, settings: Settings) -> DiskSpace | None:
    """What the next checkpoint needs: as much as the newest, less what the trainer deletes meanwhile."""
    versions = ledger.versions.all()
    if not versions or not versions[-1].version:
        return None
    gone_on_from = ledger.versions.newest().version
    places = {each.version: each.path for each in versions if each.version and each.path.exists()}
    resumable = {each.version: each.path for each in versions if each.state in SERVABLE}
    try:
        kept = {gone_on_from, newest_with_state(resumable, upto=gone_on_from)}
        states = {version: size_without_weights(path) for version, path in places.items()}
        weights = sum(file.size for file in read_manifest(versions[-1].path).files if stays(file.path))
        freed = sum(size for version, size in states.items() if version not in kept)
        needed = weights + max(states.values(), default=0) - freed
        return measure_space(settings.job_dir, needed=max(0, needed))
    except (CheckpointRejected, OSError):  # Deleted just now, or not to be seen from this machine.
        return None


def as_text(report: DoctorReport, settings: Settings) -> Iterator[str]:
    for title, lines in as_sections(report, settings).items():
        yield from (f"{title if number == 0 else '':<10} {line}" for number, line in enumerate(lines))


def as_sections(report: DoctorReport, settings: Settings) -> dict[str, list[str]]:
    facts = report.facts
    sections: dict[str, list[str]] = {}
    if facts.ledger is None:
        sections["Ledger"] = [facts.away]
    else:
        wrong = [f"does NOT hold: {sentence}" for sentence in report.imbalance]
        sections["Ledger"] = [*equation(facts.ledger), *(wrong or ["holds"]), *filter(None, [report.older])]
        sections["Waiting"] = list(_waiting(facts.ledger, facts))
        sections["Waiting"] += [
            f"{'not kept':<10} {count:>8.0f} {reason}{MARK_CURES.get(reason, '')}"
            for reason, count in sorted(report.not_stored.items())
        ]
        pace = [report.pace.sentence] if report.pace else []
        sections["Trainer"] = [_trainer(facts.ledger, facts.now), *pace, *filter(None, [report.unmerged])]
        open_versions = (
            f"version {each.version} {_HOW[each.how]} for {ago(facts.now, each.since)}, since {moment(each.since)}:"
            f" {each.why}"
            for each in report.open_versions
        )
        sections["Versions"] = [_versions(facts.ledger, facts.now), *open_versions, *report.lost_files]
        sections["Alarms"] = [
            f"{each.name}: {each.reason}; raised {ago(facts.now, each.raised_at)} ago"
            + ("; no new version is served" if each.holds else "")
            for each in facts.ledger.alarms
        ]
    if report.explorers:
        sections["Explorers"] = [
            f"{each.name}: {'up' if each.up(facts.now) else 'NOT up'}, last seen {ago(facts.now, each.seen_at)} ago,"
            f" serves {'nothing' if each.version is None else f'version {each.version}'}; {each.address}, release"
            f" {each.release}"
            for each in report.explorers
        ]
    if report.engines is not None:
        sections["Engines"] = [each.sentence for each in report.engines]
        if any(each.packs is False for each in report.engines):
            of_others = bool(settings.explorer.rollout_model.engine_urls)
            sections["Engines"].append(plugin_sentence(of_others=of_others))
    if report.clock is not None and report.clock.wrong:
        sections["Clocks"] = [f"by the ledger's time {report.clock.sentence}: correct them; they age nothing"]
    if facts.disk is not None:
        sections["Disk"] = [facts.disk.sentence]
    outbox, where = facts.outbox, "on disk" if facts.ledger is None else "not in the database yet"
    held = f"{number(outbox.records, 'record')}, {number(outbox.bytes, 'byte')} {where}"
    held += _oldest(facts.now, outbox.since)
    if outbox.refused_records:
        held += f"; the database refused {number(outbox.refused_records, 'record')}: `tuneloop outbox list`"
    sections["Outbox"] = [f"{settings.outbox_dir}: {held}"]
    sections["Outbox"] += [
        f"{file}: the database knows this file, and no explorer holds it: `tuneloop outbox drain` its folder"
        for file in report.unseen
    ]
    if report.restoring:
        sections["Restore"] = [report.restoring]
    sections["Diagnosis"] = [f"{reason.code}: {reason.sentence}" for reason in report.reasons]
    return sections


def _waiting(ledger: LedgerFacts, facts: Facts) -> Iterator[str]:
    for state, what in WAITS_FOR.items():
        waiting = ledger.count(state)
        of = f" of {facts.rules.batch_size}" if state is State.COMMITTED else ""
        yield f"{state.value:<10} {waiting.rows:>8} for {what}{of}{_oldest(facts.now, waiting.oldest)}"
    yield f"{'feedback':<10} {ledger.pending:>8} for the reply it is about{_oldest(facts.now, ledger.pending_since)}"
    for told, why in ((ledger.unfit, "no samples of the policy, not to be trained on: "), (ledger.drops, "")):
        for each in told:
            yield f"{each.state.value:<10} {each.rows:>8} {why}{each.reason}{MARK_CURES.get(each.reason, '')}"


def _oldest(now: float, then: float | None) -> str:
    return "" if then is None else f", the oldest for {ago(now, then)}, since {moment(then)}"


def _trainer(ledger: LedgerFacts, now: float) -> str:
    trainer = ledger.trainer
    if trainer is None:
        return "none has ever started"
    name = f"{trainer.name}, epoch {trainer.epoch}"
    if trainer.ended_at is not None:
        return f"{name}: stopped {ago(now, trainer.ended_at)} ago"
    return f"{name}: {'up' if trainer.up(now) else 'NOT up'}, last seen {ago(now, trainer.seen_at)} ago"


def _versions(ledger: LedgerFacts, now: float) -> str:
    weights = ledger.weights
    if weights is None:
        return "none is registered"
    served = "none" if weights.champion is None else str(weights.champion)
    rejected = f"; {number(weights.rejected, 'newest version')} rejected: {weights.reason}" if weights.rejected else ""
    registered = f"registered {ago(now, weights.registered_at)} ago"
    return f"newest {weights.newest}, {registered}; served {served}; {number(weights.step, 'step')} done{rejected}"


def as_json(report: DoctorReport) -> Mapping[str, object]:
    """The report for programs. Times are seconds since 1970, UTC."""
    facts, ledger = report.facts, report.facts.ledger
    found: dict[str, object] = {
        "now": facts.now,
        "holds": None if ledger is None else not report.imbalance,
        "imbalance": report.imbalance,
        "lost_files": report.lost_files,
        "older": report.older or None,
        "restoring": report.restoring or None,
        "clock": report.clock and report.clock._asdict(),
        "outbox": facts.outbox._asdict() | {"unseen": report.unseen},
        "disk": facts.disk and facts.disk._asdict() | {"folder": str(facts.disk.folder), "missing": facts.disk.missing},
        "reasons": [reason._asdict() for reason in report.reasons],
        "explorers": [each._asdict() | {"up": each.up(facts.now)} for each in report.explorers],
        "engines": report.engines and [each._asdict() for each in report.engines],
        "not_stored": dict(report.not_stored),
        "unmerged": report.unmerged,
        "pace": report.pace and report.pace._asdict() | {"lag": report.pace.lag},
    }
    if ledger is not None:
        found |= {
            "states": {state.value: ledger.count(state)._asdict() for state in State},
            "batch": {"size": facts.rules.batch_size, "claimable": ledger.claimable, "too_old": ledger.too_old},
            "held_back": [each._asdict() for each in ledger.held_back],
            "feedback": {"pending": ledger.pending, "oldest": ledger.pending_since},
            "trained": {"consumed": ledger.consumed, "purged": ledger.purged, "versions": ledger.versions},
            "trainer": ledger.trainer and ledger.trainer._asdict() | {"up": ledger.trainer.up(facts.now)},
            "versions": ledger.weights and ledger.weights._asdict(),
            "undecided": [each._asdict() for each in report.open_versions],
            "drops": [each._asdict() for each in ledger.drops],
            "unsampled": ledger.unsampled,
            "edited": ledger.edited,
            "unfit": [each._asdict() for each in ledger.unfit],
            "alarms": [each._asdict() for each in ledger.alarms],
        }
    return found


def find_open_versions(ledger: Ledger, settings: Settings) -> tuple[OpenVersion, ...]:
    pinned, canary, candidate = ledger.versions.pinned_version(), ledger.versions.canary(), ledger.versions.candidate()
    holding = [
        f"the alarm {each.name} holds, since {moment(each.raised_at)}"
        for each in ledger.alarms.all()
        if each.holds and not each.policy
    ]
    found = []
    for version, how, action in ((pinned, "pinned", VersionAction.PINNED), (canary, "canary", VersionAction.CANARY)):
        if version is not None:
            begun = _find(ledger, version, action)
            assert begun is not None  # written in the transaction that did it
            why = [f"by {begun.actor}{f': {begun.reason}' if begun.reason else ''}"]
            why += [f"not promoted while {each}" for each in holding] if version is canary else []
            found.append(OpenVersion(version.version, how, begun.at, "; ".join(why)))
    if candidate:
        reasons = [
            *([f"version {canary.version} is decided about first"] if canary else []),
            *([f"version {pinned.version} is pinned"] if pinned else []),
            *holding,
            *_at_the_gate(ledger, settings, candidate),
        ]
        lasting = "the explorer has not loaded it yet; if that lasts, its log says why"
        found.append(OpenVersion(candidate.version, "waits", candidate.created_at, "; ".join(reasons) or lasting))
    return tuple(found)


def _at_the_gate(ledger: Ledger, settings: Settings, candidate: Version) -> Iterator[str]:
    """What the gate lacks to let the candidate pass or to reject it."""
    evaluator, mode = evaluator_of(settings), settings.gate.mode
    # A gate that does not block waits only for engines: the trainer evaluates in its own time.
    if mode == "off" or (mode == "report" and evaluator is Evaluator.TRAINER):
        return
    champion = ledger.versions.champion()
    new, old = (ledger.evaluations.of(each.version, evaluator) for each in (candidate, champion))
    if same_tasks(new, old):
        return
    event = _find(ledger, candidate, VersionAction.EVALUATED)
    if not new:
        lacks = f"at the gate, until the {evaluator} has evaluated it"
    elif not old:
        lacks = f"at the gate, until the {evaluator} has evaluated the champion, too"
    else:
        lacks = f"at the gate: the {evaluator} has evaluated it and the champion on different tasks"
    # With figures the event is of an evaluation, without them it says why there is none.
    yield f"{lacks} ({event.reason})" if event and event.reason and not event.details else lacks


def _find(ledger: Ledger, version: Version, action: VersionAction) -> VersionEvent | None:
    return next((each for each in reversed(ledger.versions.events(version.version)) if each.action is action), None)
