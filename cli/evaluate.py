"""This file is `tuneloop evaluate`: a running service's versions are asked the same tasks, and compared by them."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from html import escape
from pathlib import Path
from statistics import fmean, variance
from typing import Annotated, Any, NamedTuple

import httpx
import typer

from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, counting, existing_ledger, tell
from tuneloop.shared.errors import EnvironmentRefused, PolicyRefused, VersionRefused
from tuneloop.shared.evaluation.samples import SampleStatistics
from tuneloop.shared.evaluation.tasks import Judge, Task, judge_of, tasks_of
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import DEFAULT
from tuneloop.shared.logging import visible
from tuneloop.shared.operations.engines import explorer_url
from tuneloop.shared.settings.settings import Settings

#: Tasks that are asked at once, how long a request may take, and how often one is sent that the service puts off.
_AT_ONCE, _REQUEST_S, _TRIES = 8, 300.0, 4
_PUT_OFF = (429, 503)

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem;color:#1b1b1b;background:#fff}
table{border-collapse:collapse;width:100%;margin:1rem 0}
th,td{border:1px solid #ccc;padding:.4rem .6rem;text-align:left;vertical-align:top}
td.text{white-space:pre-wrap;overflow-wrap:anywhere}
.right{background:#e6f4e6}.wrong{background:#fbe9e7}
@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#181818}th,td{border-color:#444}
.right{background:#173a1c}.wrong{background:#46201b}}
"""


class AskedVersion(NamedTuple):
    """A version under the name that it was asked for by, what requests name as their model, and what has it served."""

    name: str
    version: int
    model: str
    cure: str = ""


class ScoredAnswer(NamedTuple):
    text: str
    score: float
    failure: str = ""


class ComparedTask(NamedTuple):
    task: Task
    answers: list[ScoredAnswer]


class VersionScore(NamedTuple):
    """A version's scores on the tasks that all answered, of all or of a slice, against those of the first version."""

    version: AskedVersion
    slice: str
    score: SampleStatistics
    difference: SampleStatistics

    @property
    def is_worse(self) -> bool:
        return (interval := self.difference.interval) is not None and interval[1] < 0


class TaskComparison(NamedTuple):
    """What came of it, of so many `tasks`."""

    versions: list[AskedVersion]
    answered: list[ComparedTask]
    tasks: int

    @property
    def complete(self) -> bool:
        return len(self.answered) == self.tasks

    @property
    def failures(self) -> list[str]:
        return [
            f"line {each.task.line}: {version.name}: {answer.failure}"
            for each in self.answered
            for version, answer in zip(self.versions, each.answers, strict=True)
            if answer.failure
        ]

    @property
    def scores(self) -> list[VersionScore]:
        whole = [each for each in self.answered if not any(answer.failure for answer in each.answers)]
        slices = sorted({each.task.slice for each in whole if each.task.slice})
        found = []
        for part in ("", *slices):
            rows = [each.answers for each in whole if part in ("", each.task.slice)]
            for place, version in enumerate(self.versions):
                mine = [row[place].score for row in rows]
                differences = [row[place].score - row[0].score for row in rows]
                found.append(
                    VersionScore(version, part, statistics_of(mine), statistics_of(differences)._replace(binary=False))
                )
        return found

    def as_json(self) -> dict[str, Any]:
        scores = [
            {
                **{"version": each.version.version, "name": each.version.name, "slice": each.slice or None},
                **{"tasks": each.score.replies, "score": each.score.mean, "interval": each.score.interval},
                "difference": {"mean": each.difference.mean, "interval": each.difference.interval},
                "worse": each.is_worse,
            }
            for each in self.scores
        ]
        counts = {"tasks": self.tasks, "asked": len(self.answered), "complete": self.complete}
        return counts | {"failures": self.failures, "scores": scores}


def statistics_of(values: Sequence[float]) -> SampleStatistics:
    """The statistics of independent values.

    >>> statistics_of([1.0, 0.0, 1.0, 0.0]).mean
    0.5
    """
    if not values:
        return SampleStatistics()
    spread = variance(values) if len(values) > 1 else 0.0
    return SampleStatistics(len(values), len(values), fmean(values), spread, {*values} <= {0.0, 1.0})


def compare_answers(
    client: httpx.Client,
    tasks: Sequence[Task],
    versions: Sequence[AskedVersion],
    judge: Judge,
    *,
    most_tokens: int,
    progress: Callable[[int], object],
) -> TaskComparison:
    """Ask every version every task; an interrupt ends it with what there is by then.

    `client` has the service's URL and key. Raises VersionRefused for a version that is not served, EnvironmentRefused
    for a service that does not answer, and what `judge` raises.
    """

    def ask(task: Task) -> ComparedTask:
        answers = []
        for version in versions:
            text, failure = _reply(client, task, version, most_tokens)
            score = None if failure else judge(task, text)
            answers.append(
                ScoredAnswer(text, score or 0.0, failure or ("" if score is not None else "it has no verdict"))
            )
        return ComparedTask(task, answers)

    found: list[ComparedTask] = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        waiting: set[Future[ComparedTask]] = {pool.submit(ask, task) for task in tasks}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                found += [each.result() for each in done]
                progress(len(done))
        except KeyboardInterrupt:
            pass
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    order = {task.line: place for place, task in enumerate(tasks)}
    return TaskComparison([*versions], sorted(found, key=lambda each: order[each.task.line]), len(tasks))


def _reply(client: httpx.Client, task: Task, version: AskedVersion, most_tokens: int) -> tuple[str, str]:
    raw = isinstance(task.question, str)
    question = {"prompt": task.question} if raw else {"messages": task.question}
    aside = {"store": False, "metadata": {"tuneloop_train": "false"}}
    body = {"model": version.model, "max_tokens": most_tokens, "temperature": 0.0, **question, **aside}
    for _ in range(_TRIES):
        try:
            answer = client.post("/v1/completions" if raw else "/v1/chat/completions", json=body)
        except httpx.ConnectError as error:
            raise EnvironmentRefused(f"no service answers at {client.base_url}: {error}; `tuneloop run` it") from None
        except httpx.HTTPError as error:
            return "", f"{type(error).__name__} {error}".strip()
        if answer.status_code not in _PUT_OFF:
            break
    if answer.is_success:
        if (by := answer.headers.get("x-tuneloop-version", "")) != str(version.version):
            return "", f"version {by or 'unknown'} answered"
        [choice] = answer.json()["choices"][:1]
        return (choice["text"] if raw else choice["message"].get("content")) or "", ""
    try:
        told = answer.json()["error"]
        code, sentence = told.get("code"), str(told["message"])
    except (ValueError, LookupError, TypeError, AttributeError):
        code, sentence = None, answer.text[:200]
    if answer.status_code in (401, 403):
        raise EnvironmentRefused(f"{client.base_url}: {sentence}; put a key into TUNELOOP_API_KEY")
    if code == "model_not_found":
        raise VersionRefused(f"{version.name}: {sentence}; {version.cure}".rstrip("; "))
    return "", f"{answer.status_code}: {sentence}"


def page_of(comparison: TaskComparison, title: str) -> str:
    """The answers side by side, as one HTML file that needs no other. What models and files say is escaped."""

    def text(value: object) -> str:
        return escape(visible(str(value), keep="\n\t"))

    def rows() -> Iterator[str]:
        for each in comparison.answered:
            question = each.task.question
            turns = (
                [] if isinstance(question, str) else [f"{each.get('role')}: {each.get('content')}" for each in question]
            )
            asked = question if isinstance(question, str) else "\n".join(turns)
            cells = "".join(
                f'<td class="text {"right" if answer.score >= 1 else "wrong"}">{text(answer.failure or answer.text)}'
                f"<br><small>{'failed' if answer.failure else f'{answer.score:g}'}</small></td>"
                for answer in each.answers
            )
            told = f'<td>{each.task.line}</td><td class="text">{text(asked)}</td>'
            yield f'<tr>{told}<td class="text">{text(each.task.answer)}</td>{cells}</tr>'

    names = "".join(f"<th>{text(each.name)} (version {each.version})</th>" for each in comparison.versions)
    summary = "".join(f"<li>{text(line)}</li>" for line in lines_of(comparison))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{text(title)}</title><style>{_STYLE}</style>'
        f"<h1>{text(title)}</h1><ul>{summary}</ul>"
        f"<table><tr><th>line</th><th>question</th><th>answer</th>{names}</tr>{''.join(rows())}</table></html>\n"
    )


def lines_of(comparison: TaskComparison) -> Iterator[str]:
    if not comparison.complete:
        yield f"interrupted: {len(comparison.answered)} of {comparison.tasks} tasks were asked; this is a part"
    first = comparison.versions[0].name
    for each in comparison.scores:
        name = each.version.name + (
            "" if each.version.name == str(each.version.version) else f" ({each.version.version})"
        )
        where = f" on {each.slice}" if each.slice else ""
        told = f"{name}{where}: {each.score.mean:.3f}{_interval(each.score)} in {each.score.replies} tasks"
        if each.version is not comparison.versions[0]:
            told += f"; {each.difference.mean:+.3f}{_interval(each.difference, '+.3f')} against {first}"
            told += ", worse" if each.is_worse else ""
        yield told
    failures = comparison.failures
    yield from failures[:5]
    if len(failures) > 5:
        yield f"and {len(failures) - 5} more failures; the tasks are left out of all scores"


def _interval(statistics: SampleStatistics, form: str = ".3f") -> str:
    if (interval := statistics.interval) is None:
        return ""
    return f" [{interval[0]:{form}}, {interval[1]:{form}}]"


def evaluate(
    tasks: Annotated[Path, typer.Argument(metavar="TASKS.jsonl", help="Tasks with known answers, one a line.")],
    config: ConfigOption,
    versions: Annotated[
        str, typer.Option(help="What is compared with the first: base, champion, numbers, names of policies.")
    ] = "base,champion",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the answers there, side by side.")] = None,
    fail_if_worse: Annotated[
        bool, typer.Option("--fail-if-worse", help="End with 1 if a version is worse than the first, beyond chance.")
    ] = False,
    service: Annotated[
        str | None, typer.Option(metavar="URL", help="The service; its key is read from TUNELOOP_API_KEY.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 256,
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Ask versions of the running service the same tasks, and compare their scores task by task."""
    with existing_ledger(config, set_) as (settings, ledger):
        asked = [_find_version(settings, ledger, name.strip()) for name in versions.split(",") if name.strip()]
    if not asked:
        raise VersionRefused("--versions names none; write --versions base,champion")
    options = settings.monitor.evaluation.model_copy(update={"path": tasks})
    questions, judge = tasks_of(options, named=""), judge_of(options)
    if judge is None:
        raise EnvironmentRefused(
            "monitor.evaluation.judge: model is asked by the services alone; --set monitor.evaluation.judge=contains"
        )
    key = os.environ.get("TUNELOOP_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = (service or explorer_url(settings)).rstrip("/").removesuffix("/v1")
    with httpx.Client(base_url=url, headers=headers, timeout=_REQUEST_S) as client, counting("tasks") as progress:
        found = compare_answers(client, questions, asked, judge, most_tokens=max_tokens, progress=progress)
    if html is not None:
        try:
            html.write_text(page_of(found, f"{tasks.name}: {', '.join(each.name for each in asked)}"))
        except OSError as error:
            raise EnvironmentRefused(f"{html} cannot be written: {error.strerror}") from None
    tell(found.as_json(), *lines_of(found), for_programs=for_programs)
    is_worse = fail_if_worse and any(each.is_worse for each in found.scores if not each.slice)
    if is_worse or not found.complete or not any(each.score.replies for each in found.scores):
        raise typer.Exit(1)


def _find_version(settings: Settings, ledger: Ledger, name: str) -> AskedVersion:
    own = {
        policy.id: policy.name if policy.id != DEFAULT else settings.served_model_name
        for policy in ledger.policies.all()
    }
    champions = {ledger.versions.of(policy).champion().version: model for policy, model in own.items()}
    if name == "base" or (name.isascii() and name.isdigit()):
        number = 0 if name == "base" else int(name)
        if number not in {each.version for each in ledger.versions.all()}:
            raise VersionRefused(f"there is no version {number}; `tuneloop versions list` names them")
    elif name == "champion":
        number = ledger.versions.champion().version
    else:
        try:
            number = ledger.versions.of(ledger.policies.find(name).id).champion().version
        except PolicyRefused as error:
            raise VersionRefused(f"--versions {name}: neither base, champion nor a number, and {error}") from None
    if number in champions:
        return AskedVersion(name, number, champions[number])
    cure = f"`tuneloop versions pin {number}` has it served, and `tuneloop versions unpin` ends that"
    if settings.model.lora.rank:
        cure = f"`tuneloop policies create NAME --parent {number}` has it served beside others: --versions NAME"
    elif not settings.explorer.version_pins:
        cure = "explorer.version_pins: true lets clients ask for a version; " + cure
    return AskedVersion(name, number, f"{settings.served_model_name}@{number}", cure)
