"""Runs the command `python -m tuneloop.runner tasks`: converts logs to a data set of tasks."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from tuneloop.runner.errors import JudgeError, LogRefused, ServiceRefused
from tuneloop.runner.judging.endpoint import Endpoint
from tuneloop.runner.judging.judge import Judge
from tuneloop.runner.judging.rubric import Rubric
from tuneloop.runner.logs.exchange import BrokenEntries, LoggedExchange
from tuneloop.runner.logs.request_logs import read_export, read_openai_jsonl, read_stored_completions
from tuneloop.runner.tasks.task_set import (
    ExchangeFilter,
    ImportedTask,
    all_of,
    asks,
    between,
    by_model,
    deduplicate,
    learn_task_rubric,
    offers_tools,
    read_tasks,
    screen_tasks,
    tasks_of,
    turns,
    with_reward,
    write_tasks,
)

_KEY = "OPENAI_API_KEY"

_READERS: dict[str, Callable[[Path, BrokenEntries], Iterator[LoggedExchange]]] = {
    "export": read_export,
    "openai": read_openai_jsonl,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit codes: 0, 1 for refused input or an unavailable service, 2 for a wrong command line."""
    options = make_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], None] = options.run
    try:
        run(options)
    except (LogRefused, ServiceRefused, JudgeError, ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="python -m tuneloop.runner tasks", description=__doc__)
    commands = whole.add_subparsers(required=True)
    parser = commands.add_parser("import", help="convert logged exchanges to a data set of tasks")
    kinds = ", ".join([*_READERS, "service"])
    help_ = f"KIND:PATH; the kinds are {kinds} (service:URL); may be repeated"
    parser.add_argument("--from", dest="sources", action="append", required=True, metavar="KIND:PATH", help=help_)
    parser.add_argument("--to", type=Path, required=True, help="the file of tasks, JSON lines")
    parser.add_argument("--min-reward", type=float, help="only exchanges with a reward of this or more")
    parser.add_argument("--max-reward", type=float, help="only exchanges with a reward of this or less")
    parser.add_argument("--since", type=_time, help="ISO 8601, UTC without an offset")
    parser.add_argument("--until", type=_time, help="the same, exclusive")
    parser.add_argument("--model", action="append", help="only requests to this model; may be repeated")
    parser.add_argument("--asks", metavar="REGEX", help="only questions that match")
    parser.add_argument("--tools", action="store_true", help="only exchanges with offered tools")
    parser.add_argument("--first", action="store_true", help="only first turns of conversations")
    parser.add_argument("--trust", type=float, metavar="REWARD", help="replies with such a reward are right answers")
    parser.add_argument("--near", type=float, default=0.8, help="share of common shingles of duplicates; 0: exact only")
    parser.add_argument("--strict", action="store_true", help="write nothing if a line or a span cannot be read")
    parser.add_argument("--include-opted-out", action="store_true", help="include exchanges that refuse training")
    parser.add_argument("--rubric", type=Path, help="a judge keeps tasks by this rubric")
    parser.add_argument("--good", type=Path, help="a few tasks worth training on; with --bad: learn the rubric first")
    parser.add_argument("--bad", type=Path, help="a few tasks that are not")
    parser.add_argument("--least", type=float, default=0.5, help="keep verdicts of at least this, from 0 to 1")
    parser.add_argument("--judge-url", help="an OpenAI-compatible endpoint, ending in /v1")
    parser.add_argument("--judge-model", help=f"its model; the key is read from {_KEY}")
    parser.set_defaults(run=_import)
    return whole


def _import(options: argparse.Namespace) -> None:
    broken = {source: BrokenEntries(strict=options.strict) for source in options.sources}
    ends = {"least": options.min_reward, "most": options.max_reward}
    span = {"since": options.since, "until": options.until}
    chosen: list[ExchangeFilter] = []
    if given := {name: value for name, value in ends.items() if value is not None}:
        chosen.append(with_reward(**given))
    if given := {name: value for name, value in span.items() if value is not None}:
        chosen.append(between(**given))
    if options.model:
        chosen.append(by_model(*options.model))
    if options.asks:
        chosen.append(asks(options.asks))
    if options.tools:
        chosen.append(offers_tools())
    if options.first:
        chosen.append(turns(1))
    tasks, counts = tasks_of(
        chain.from_iterable(_read(source, broken[source]) for source in options.sources),
        keep=all_of(*chosen),
        trust=options.trust,
        include_opted_out=options.include_opted_out,
    )
    once = deduplicate(tasks, near=options.near or None)
    for line in chain.from_iterable(each.report() for each in broken.values()):
        sys.stderr.write(f"left out: {line}\n")
    summary = [f"{counts.read} exchanges", f"{sum(each.total for each in broken.values())} broken"]
    summary += [f"{counts.opted_out} opted out", f"{counts.filtered} filtered"]
    summary += [f"{counts.without_question} without a question", f"{counts.tasks} tasks"]
    summary += [f"{len(once.exact)} exact and {len(once.near)} near duplicates"]
    kept: Sequence[ImportedTask] = once.kept
    if options.rubric:
        if not options.judge_url or not options.judge_model:
            raise ValueError("name a model: --judge-url and --judge-model")
        key = os.environ.get(_KEY)
        asked = Endpoint(base_url=options.judge_url, model=options.judge_model, api_key=key, temperature=0.0)
        with asked.open() as endpoint:
            if options.good and options.bad:  # write the rubric first
                questions = [[each.question for each in read_tasks(path)] for path in (options.good, options.bad)]
                learn_task_rubric(questions[0], questions[1], endpoint).save(options.rubric)
            rubric = Rubric.load(options.rubric)
            judge = Judge(
                base_url=endpoint.base_url,
                model=endpoint.model,
                api_key=endpoint.api_key,
                criteria=rubric.criteria,
                weights=rubric.weights,
                scale=rubric.scale,
            )
            with closing(judge):
                screened = screen_tasks(kept, judge, least=options.least)
        kept = screened.kept
        summary += [f"{len(screened.rejected)} rejected by the judge", f"{len(screened.unjudged)} without a verdict"]
    _say([*summary, f"{write_tasks(options.to, kept)} written to {options.to}"])


def _read(source: str, broken: BrokenEntries) -> Iterator[LoggedExchange]:
    kind, colon, place = source.partition(":")
    if kind == "service" and colon:
        yield from read_stored_completions(place, api_key=os.environ.get("TUNELOOP_API_KEY"))
        return
    if kind not in _READERS or not place:
        raise ValueError(f"--from {source}: write KIND:PATH; the kinds are {', '.join([*_READERS, 'service'])}")
    nothing = True
    for exchange in _READERS[kind](Path(place), broken):
        nothing = False
        yield exchange
    if nothing and broken.total:
        raise LogRefused(f"--from {source}: no entry is readable: {next(broken.report())}")


def _say(parts: Iterable[str]) -> None:
    sys.stdout.write(", ".join(parts) + "\n")


def _time(text: str) -> float:
    read = datetime.fromisoformat(text)
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
