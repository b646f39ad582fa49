"""This file is `tuneloop versions`."""

import getpass
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated

import msgspec
import typer

from tuneloop.cli.options import ConfigOption, SetOption, existing_ledger
from tuneloop.shared.evaluation.off_policy import REPLAY_OF
from tuneloop.shared.evaluation.scores import TASKS
from tuneloop.shared.operations.diagnosis import ago, moment, number
from tuneloop.shared.operations.version_comparison import FEWEST, Comparison, Mean, ScorePair, compared
from tuneloop.shared.operations.version_decisions import Decided, pin, promote, roll_back, unpin
from tuneloop.shared.operations.version_report import Event, Score, VersionRow, VersionStory, listed, story
from tuneloop.shared.settings.settings import Settings

app = typer.Typer(help="The versions: what answers, what might, what must not.", no_args_is_help=True)

#: What a database can be asked for.
MAX_VERSION = 2**31 - 1

_Version = Annotated[int, typer.Argument(metavar="N", min=0, max=MAX_VERSION, help="Its number.")]
_Json = Annotated[bool, typer.Option("--json", help="Print it for programs.")]
_By = Annotated[str | None, typer.Option("--by", help="Who decides; your user name if you don't say.")]
_Expect = Annotated[
    int | None,
    typer.Option("--expect", metavar="N", min=0, max=MAX_VERSION, help="Do it only if this is the champion."),
]
_Why = Annotated[str, typer.Option("--reason", help="Why, for those who read it later.")]


@app.command("list")
def list_(config: ConfigOption, set_: SetOption = None, for_programs: _Json = False) -> None:
    """List the versions, the newest first."""
    _settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        rows = listed(ledger)
    typer.echo(_json(rows) if for_programs else "\n".join(_table(rows, time.time())) or "no version is registered yet")


@app.command()
def show(version: _Version, config: ConfigOption, set_: SetOption = None, for_programs: _Json = False) -> None:
    """Tell all that is known of a version."""
    _settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        told = story(ledger, version)
    typer.echo(_json(told) if for_programs else "\n".join(_told(told)))


@app.command()
def compare(
    a: Annotated[int, typer.Argument(metavar="A", min=0, max=MAX_VERSION, help="One version.")],
    b: Annotated[int, typer.Argument(metavar="B", min=0, max=MAX_VERSION, help="The other.")],
    config: ConfigOption,
    set_: SetOption = None,
    for_programs: _Json = False,
) -> None:
    """Put two versions side by side: rewards, lengths of their replies, evaluations."""
    _settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        comparison = compared(ledger, a, b)
    typer.echo(_json(comparison) if for_programs else "\n".join(_side_by_side(comparison)))


@app.command("promote")
def promote_(
    version: _Version,
    config: ConfigOption,
    set_: SetOption = None,
    reason: _Why = "",
    by: _By = None,
    expect: _Expect = None,
) -> None:
    """Make a version the champion, an older one too."""
    settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        promote(ledger, version, _decided(by, reason, expect))
    typer.echo(f"version {version} is the champion; {_taken_up(settings)}")


@app.command("rollback")
def rollback(
    config: ConfigOption,
    reason: Annotated[str, typer.Option("--reason", help="Why, for those who read it later.")],
    version: Annotated[int | None, typer.Argument(metavar="[N]", min=0, max=MAX_VERSION, help="Its number.")] = None,
    set_: SetOption = None,
    by: _By = None,
    expect: _Expect = None,
) -> None:
    """Take a version out of service for good: the canary, or the champion if there is none, unless you say which."""
    settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        ruling = roll_back(ledger, version, _decided(by, reason, expect))
    typer.echo(
        f"version {ruling.version} is rolled back; version {ruling.champion} is the champion; {_taken_up(settings)}"
    )


@app.command("pin")
def pin_(
    version: _Version,
    config: ConfigOption,
    set_: SetOption = None,
    reason: _Why = "",
    by: _By = None,
    expect: _Expect = None,
) -> None:
    """Serve a version, and no other until it is unpinned."""
    settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        pin(ledger, version, _decided(by, reason, expect))
    typer.echo(f"version {version} is pinned, and the champion until it is unpinned; {_taken_up(settings)}")


@app.command("unpin")
def unpin_(config: ConfigOption, set_: SetOption = None, reason: _Why = "", by: _By = None) -> None:
    """Let newer versions be served again."""
    settings, ledger = existing_ledger(config, set_)
    with closing(ledger):
        ruling = unpin(ledger, _decided(by, reason))
    typer.echo(f"version {ruling.version} is pinned no more; {_taken_up(settings)}")


def _decided(by: str | None, reason: str, expect: int | None = None) -> Decided:
    return Decided(by or getpass.getuser(), reason.strip(), expect)


def _taken_up(settings: Settings) -> str:
    return f"the explorer takes it up within {settings.explorer.service_status_check_interval:g} s"


def _json(told: object) -> str:
    return msgspec.json.format(msgspec.json.encode(told)).decode()


def _table(rows: list[VersionRow], now: float) -> Iterator[str]:
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
        yield _line(cells, row.reason or "").rstrip()


def _line(cells: tuple[str, ...], reason: str) -> str:
    version, state, step, trained, rewarded, mean, age = cells
    return f"{version:>7}  {state:<19} {step:>6} {trained:>11} {rewarded:>15} {mean:>9} {age:>7}  {reason}"


def _told(told: VersionStory) -> Iterator[str]:
    row = told.version
    rows = ", ".join(f"{count} of version {version}'s" for version, count in told.trained_on_replies_of.items())
    facts = {
        "state": f"{row.state}{', pinned' if row.pinned else ''}{f': {row.reason}' if row.reason else ''}",
        "parent": "" if told.parent is None else f"version {told.parent}",
        "step": str(row.step),
        "trained on": f"{number(row.trained_on, 'row')}{f': {rows}' if rows else ''}",
        "rewarded": f"{row.rewarded} of {row.replies} replies, {_figure(row.mean_reward)} on average",
        "registered": moment(row.created_at),
        "first served": "" if row.served_at is None else moment(row.served_at),
        "path": told.path,
        "manifest": f"sha256 {told.manifest_sha256}" if told.manifest_sha256 else "",
    }
    yield f"version {row.version}"
    yield from (f"  {name:<12} {value}" for name, value in facts.items() if value)
    scores = [each for each in told.evaluations if each.metric not in {TASKS, REPLAY_OF}]
    if scores:
        yield "evaluations"
        yield from (f"  {_named(each):<32} {_score(each)}" for each in scores)
    yield "events"
    yield from (f"  {line}" for event in told.events for line in _event(event))


def _event(event: Event) -> Iterator[str]:
    why = f": {event.reason}" if event.reason else ""
    yield f"{moment(event.at)}  {event.action} by {event.actor}{why}"
    if event.details:
        yield f"  {msgspec.json.encode(event.details).decode()}"


def _side_by_side(comparison: Comparison) -> Iterator[str]:
    a, b = comparison.a, comparison.b
    yield _columns("", *(f"version {side.version}" for side in (a, b)))
    yield _columns("state", a.state, b.state)
    yield _columns("replies", str(a.replies), str(b.replies))
    yield _columns("tokens", _mean(a.tokens), _mean(b.tokens))
    yield _columns("seconds per token", _mean(a.seconds_per_token), _mean(b.seconds_per_token))
    yield _columns("reward", _mean(a.reward), _mean(b.reward))
    yield _columns("rewarded", _rewarded(a.reward), _rewarded(b.reward))
    yield _columns("difference", _difference(comparison))
    for pair in comparison.evaluations:
        if pair.metric != TASKS:
            yield _columns(_named(pair), _score(pair.a), _score(pair.b))
        elif pair.a and pair.b and pair.a.value != pair.b.value:
            yield f"by {pair.evaluator} they were asked different tasks: those figures say nothing of each other"


def _columns(name: str, *values: str) -> str:
    return f"{name:<28} {''.join(f'{value:<28}' for value in values)}".rstrip()


def _mean(mean: Mean | None) -> str:
    return "-" if mean is None else f"{mean.mean:.4g}{_within(mean.error)}"


def _rewarded(mean: Mean | None) -> str:
    return "0" if mean is None else f"{mean.replies} from {number(mean.sources, 'source')}"


def _difference(comparison: Comparison) -> str:
    if comparison.difference is None:
        return "-"
    told = f"{comparison.difference:+.4g}"
    if comparison.interval is None:
        return f"{told}, from too few sources to say more ({FEWEST} of each)"
    low, high = comparison.interval
    return f"{told}, 95 % interval {low:+.4g} to {high:+.4g}"


def _named(each: Score | ScorePair) -> str:
    return f"{each.metric}{f' [{each.slice}]' if each.slice else ''} by {each.evaluator}"


def _score(each: Score | None) -> str:
    return "-" if each is None else f"{each.value:.4g}{_within(each.deviation)} of {each.samples}"


def _within(deviation: float | None) -> str:
    return "" if deviation is None else f" ± {deviation:.4g}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
