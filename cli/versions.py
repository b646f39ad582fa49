"""This file is `tuneloop versions`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tuneloop.cli.command_group import CommandGroup
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, existing_ledger, operator_name, tell
from tuneloop.shared.evaluation.scores import TASKS
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.logging import visible
from tuneloop.shared.operations.diagnosis import ago, moment, number
from tuneloop.shared.operations.version_decisions import (
    DecisionRequest,
    DecisionResult,
    pin,
    promote,
    reject,
    roll_back,
    unpin,
)
from tuneloop.shared.operations.version_report import (
    MIN_SOURCES,
    Comparison,
    Mean,
    ScorePair,
    ScoreRow,
    VersionReport,
    VersionRow,
    compare_versions,
    list_versions,
    report_version,
)

app = typer.Typer(
    help="The versions: which one serves, which may, which must not.", no_args_is_help=True, cls=CommandGroup
)

MAX_VERSION = 2**31 - 1

_Version = Annotated[int, typer.Argument(metavar="N", min=0, max=MAX_VERSION, help="Its number.")]
_By = Annotated[str | None, typer.Option("--by", help="Who decides; default: your user name.")]
_Expect = Annotated[
    int | None,
    typer.Option("--expect", metavar="N", min=0, max=MAX_VERSION, help="Only if this is the champion."),
]
_Reason = Annotated[str, typer.Option("--reason", help="The reason, for the record.")]


@app.command("list")
def list_(config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """List the versions, the newest first."""
    with existing_ledger(config, set_) as (_settings, ledger):
        rows, now = list_versions(ledger), ledger.transactions.time()
    tell(rows, *list(_table_lines(rows, now)) or ["no version is registered yet"], for_programs=for_programs)


@app.command()
def show(version: _Version, config: ConfigOption, set_: SetOption = None, for_programs: JsonOption = False) -> None:
    """Show everything about a version."""
    with existing_ledger(config, set_) as (_settings, ledger):
        report = report_version(ledger, version)
    tell(report, *_version_lines(report), for_programs=for_programs)


@app.command()
def compare(
    a: Annotated[int, typer.Argument(metavar="A", min=0, max=MAX_VERSION, help="One version.")],
    b: Annotated[int, typer.Argument(metavar="B", min=0, max=MAX_VERSION, help="The other.")],
    config: ConfigOption,
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Put two versions side by side: rewards, lengths of their replies, evaluations."""
    with existing_ledger(config, set_) as (_settings, ledger):
        comparison = compare_versions(ledger, a, b)
    tell(comparison, *_comparison_lines(comparison), for_programs=for_programs)


def _decides(verb: Callable[[Ledger, int, DecisionRequest], DecisionResult], sentence: str) -> Callable[..., None]:
    def command(
        version: _Version,
        config: ConfigOption,
        expect: _Expect = None,
        reason: _Reason = "",
        by: _By = None,
        set_: SetOption = None,
        for_programs: JsonOption = False,
    ) -> None:
        asked = DecisionRequest(by or operator_name(), reason.strip(), expect)
        _decide(config, set_, lambda ledger: verb(ledger, version, asked), sentence, for_programs=for_programs)

    return command


app.command("promote", help="Make a version the champion, an older one too.")(
    _decides(promote, "version {version} is the champion; {served}")
)
app.command("pin", help="Serve a version, and no other until it is unpinned.")(
    _decides(pin, "version {version} is pinned, and the champion until it is unpinned; {served}")
)


@app.command("rollback")
def roll_back_(
    config: ConfigOption,
    reason: _Reason,
    version: Annotated[int | None, typer.Argument(metavar="[N]", min=0, max=MAX_VERSION, help="Its number.")] = None,
    expect: _Expect = None,
    by: _By = None,
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Take a version out of service for good: the canary, or the champion if there is none, unless one is given."""
    asked = DecisionRequest(by or operator_name(), reason.strip(), expect)
    sentence = "version {version} is rolled back; version {champion} is the champion; {served}"
    _decide(config, set_, lambda ledger: roll_back(ledger, version, asked), sentence, for_programs=for_programs)


@app.command("reject")
def reject_(
    version: _Version,
    config: ConfigOption,
    reason: _Reason,
    by: _By = None,
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Say of a candidate, or a retired version, that it must never be served."""
    asked = DecisionRequest(by or operator_name(), reason.strip())
    sentence = "version {version} is rejected; version {champion} is the champion"
    _decide(config, set_, lambda ledger: reject(ledger, version, asked), sentence, for_programs=for_programs)


@app.command("unpin")
def unpin_(
    config: ConfigOption,
    version: Annotated[
        int | None, typer.Argument(metavar="[N]", min=0, max=MAX_VERSION, help="A version of the policy that is meant.")
    ] = None,
    reason: _Reason = "",
    by: _By = None,
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Let newer versions be served again."""
    asked = DecisionRequest(by or operator_name(), reason.strip())
    sentence = "version {version} is unpinned; {served}"
    _decide(config, set_, lambda ledger: unpin(ledger, version, asked), sentence, for_programs=for_programs)


def _decide(
    config: Path,
    set_: list[str] | None,
    decision: Callable[[Ledger], DecisionResult],
    sentence: str,
    *,
    for_programs: bool,
) -> None:
    with existing_ledger(config, set_) as (settings, ledger):
        result = decision(ledger)
    served = f"the explorer loads it within {settings.explorer.service_status_check_interval:g} s"
    told = sentence.format(**result._asdict(), served=served)
    tell(result._asdict(), told, for_programs=for_programs)


def _table_lines(rows: list[VersionRow], now: float) -> Iterator[str]:
    if rows:
        columns = ("version", "state", "step", "trained on", "rewarded", "mean", "age")
        yield _line(columns, "reason").rstrip()
    for row in rows:
        cells = (
            str(row.version),
            f"{row.state}{', pinned' if row.pinned else ''}",
            str(row.step),
            str(row.trained_on),
            f"{row.rewarded} of {row.replies}",
            _figure(row.mean_reward),
            ago(now, row.created_at),
        )
        yield _line(cells, visible(row.reason or "")).rstrip()


def _line(cells: tuple[str, ...], reason: str) -> str:
    version, state, step, trained, rewarded, mean, age = cells
    return f"{version:>7}  {state:<19} {step:>6} {trained:>11} {rewarded:>15} {mean:>9} {age:>7}  {reason}"


def _version_lines(report: VersionReport) -> Iterator[str]:
    row = report.version
    rows = ", ".join(f"{count} of version {version}'s" for version, count in report.trained_on_replies_of.items())
    facts = {
        "state": f"{row.state}{', pinned' if row.pinned else ''}{f': {visible(row.reason)}' if row.reason else ''}",
        "parent": "" if report.parent is None else f"version {report.parent}",
        "step": str(row.step),
        "trained on": f"{number(row.trained_on, 'row')}{f': {rows}' if rows else ''}",
        "rewarded": f"{row.rewarded} of {row.replies} replies, {_figure(row.mean_reward)} on average",
        "registered": moment(row.created_at),
        "first served": "" if row.served_at is None else moment(row.served_at),
        "path": report.path,
        "manifest": f"sha256 {report.manifest_sha256}" if report.manifest_sha256 else "",
    }
    yield f"version {row.version}"
    yield from (f"  {name:<12} {value}" for name, value in facts.items() if value)
    scores = [each for each in report.evaluations if each.metric != TASKS]
    if scores:
        yield "evaluations"
        yield from (f"  {_metric_name(each):<32} {_score(each)}" for each in scores)
    yield "events"
    for event in report.events:
        why = f": {visible(event.reason)}" if event.reason else ""
        yield f"  {moment(event.at)}  {event.action} by {visible(event.actor)}{why}"
        if event.details:
            yield f"    {msgspec.json.encode(event.details).decode()}"


def _comparison_lines(comparison: Comparison) -> Iterator[str]:
    a, b = comparison.a, comparison.b
    yield _columns("", *(f"version {side.version}" for side in (a, b)))
    yield _columns("state", a.state, b.state)
    yield _columns("replies", str(a.replies), str(b.replies))
    yield _columns("tokens", _mean(a.tokens), _mean(b.tokens))
    yield _columns("seconds per token", _mean(a.seconds_per_token), _mean(b.seconds_per_token))
    yield _columns("reward", _mean(a.reward), _mean(b.reward))
    yield _columns("rewarded", _reward_count(a.reward), _reward_count(b.reward))
    difference = "-" if comparison.difference is None else f"{comparison.difference:+.4g}"
    if comparison.interval is not None:
        low, high = comparison.interval
        difference += f", 95 % interval {low:+.4g} to {high:+.4g}"
    elif comparison.difference is not None:
        difference += f", from too few sources for an interval ({MIN_SOURCES} of each)"
    yield _columns("difference", difference)
    for pair in comparison.evaluations:
        if pair.metric != TASKS:
            yield _columns(_metric_name(pair), _score(pair.a), _score(pair.b))
        elif pair.a and pair.b and pair.a.value != pair.b.value:
            yield f"by {pair.evaluator} the tasks differ: those figures cannot be compared"


def _columns(name: str, *values: str) -> str:
    return f"{name:<28} {''.join(f'{value:<28}' for value in values)}".rstrip()


def _mean(mean: Mean | None) -> str:
    return "-" if mean is None else f"{mean.mean:.4g}{_plus_minus(mean.error)}"


def _reward_count(mean: Mean | None) -> str:
    return "0" if mean is None else f"{mean.replies} from {number(mean.sources, 'source')}"


def _metric_name(each: ScoreRow | ScorePair) -> str:
    return f"{each.metric}{f' [{each.slice}]' if each.slice else ''} by {each.evaluator}"


def _score(each: ScoreRow | None) -> str:
    return "-" if each is None else f"{each.value:.4g}{_plus_minus(each.deviation)} of {each.samples}"


def _plus_minus(deviation: float | None) -> str:
    return "" if deviation is None else f" ± {deviation:.4g}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
