"""The command `python -m tuneloop.runner prefer`: somebody chooses between two answers, blind."""

import argparse
import getpass
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tuneloop.runner.collection.blind_pairs import (
    BlindPair,
    HumanPreferenceCollector,
    PairChoice,
    append_lines,
    read_pairs,
    read_preferences,
)
from tuneloop.runner.errors import LogRefused, ServiceRefused
from tuneloop.runner.logs.exchange import json_lines
from tuneloop.runner.rewards.chat_messages import chat_messages
from tuneloop.runner.rewards.reply import text_of

_KEYS: dict[str, PairChoice] = {"1": "left", "2": "right", "t": "tie", "s": "skip"}

_ASKS = "1 or 2 is better, t: as good, s: skip, q: quit > "


def main(argv: Sequence[str] | None = None, *, ask: Callable[[str], str] = input) -> int:
    """Run the command; the exit code: 0, 1 for what is refused or away, 2 for a wrong command line."""
    options = _parser().parse_args(argv)
    collector = HumanPreferenceCollector(
        options.service,
        api_key=os.environ.get("TUNELOOP_API_KEY"),
        source=options.source or getpass.getuser(),
        seed=options.seed,
    )
    try:
        return _run(options, collector, ask)
    except (LogRefused, ServiceRefused, ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        collector.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tuneloop.runner prefer", description=__doc__)
    parser.add_argument("--service", required=True, help="the service's URL, without /v1")
    parser.add_argument("--to", type=Path, required=True, help="where pairs and choices are kept: FILE and FILE.pairs")
    questions = parser.add_mutually_exclusive_group()
    questions.add_argument("--questions", type=Path, help="JSON lines with a question, or messages, each")
    questions.add_argument("--replies", type=Path, help="JSON lines with the ids of two stored replies: {a, b}")
    parser.add_argument("--model", help="the name of the served model, for --questions")
    parser.add_argument("--versions", type=int, nargs=2, metavar=("A", "B"), help="the versions that answer")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--source", help="who chooses; the user of the system unless given")
    parser.add_argument("--seed", type=int, default=0, help="decides which answer stands on which side")
    parser.add_argument("--only-pairs", action="store_true", help="make the pairs, for a page to show, and ask nobody")
    return parser


def _run(options: argparse.Namespace, collector: HumanPreferenceCollector, ask: Callable[[str], str]) -> int:
    pairs_file = options.to.with_name(f"{options.to.name}.pairs")
    known = {each.pair_id: each for each in read_pairs(pairs_file)} if pairs_file.exists() else {}
    for pair in _pairs(options, collector, list(known.values())):
        append_lines(pairs_file, [pair])
        known[pair.pair_id] = pair
    if options.only_pairs:
        sys.stdout.write(f"{len(known)} pairs in {pairs_file}\n")
        return 0
    preferences_by_pair = read_preferences(options.to)
    for number, pair in enumerate(known.values(), start=1):
        if pair.pair_id in preferences_by_pair:
            continue
        same = pair.texts[0] == pair.texts[1]
        choice = "tie" if same else _choose(pair, f"{number}/{len(known)}", ask)
        if choice is None:
            break
        preference = collector.record(pair, choice)
        append_lines(options.to, [preference])
        preferences_by_pair[pair.pair_id] = preference
    counts = {key: sum(each.choice == key for each in preferences_by_pair.values()) for key in ("tie", "skip")}
    preferences = len(preferences_by_pair) - sum(counts.values())
    left = len(known) - len(preferences_by_pair)
    sys.stdout.write(f"{preferences} preferences, {counts['tie']} ties, {counts['skip']} skipped, {left} left\n")
    return 0


def _pairs(
    options: argparse.Namespace, collector: HumanPreferenceCollector, known: Sequence[BlindPair]
) -> Iterator[BlindPair]:
    """The pairs that are not known yet: what was sampled once is not sampled again."""
    if options.replies:
        there = {frozenset(each.ids or ()) for each in known}
        for _, row in json_lines(options.replies):
            ids = str(row.get("a")), str(row.get("b"))
            if frozenset(ids) not in there:
                yield collector.pair_of(*ids)
        return
    if options.questions is None:
        if not known:
            raise ValueError("name --questions with --model and --versions, or --replies")
        return
    if not options.model or not options.versions:
        raise ValueError("--questions needs --model and --versions")
    for number, row in json_lines(options.questions):
        messages = chat_messages(row.get("messages") or [{"role": "user", "content": _question(row, number)}])
        if all(list(each.messages) != messages for each in known):
            first, second = options.versions
            yield collector.sample(messages, options.model, (first, second), max_tokens=options.max_tokens)


def _question(row: dict[str, Any], number: int) -> str:
    question = row.get("question")
    if not isinstance(question, str):
        raise LogRefused(f"line {number}: a question or messages are needed")
    return question


def _choose(pair: BlindPair, where: str, ask: Callable[[str], str]) -> PairChoice | None:
    """What somebody answers; None if they want no more."""
    conversation = "\n".join(f"[{each['role']}] {text_of(each.get('content'))}" for each in pair.messages)
    sys.stdout.write(f"\n--- {where}\n{conversation}\n\n--- 1\n{pair.texts[0]}\n\n--- 2\n{pair.texts[1]}\n\n")
    while True:
        try:
            answer = ask(_ASKS).strip().lower()
        except (EOFError, KeyboardInterrupt):
            return None
        if answer == "q":
            return None
        if answer in _KEYS:
            return _KEYS[answer]
