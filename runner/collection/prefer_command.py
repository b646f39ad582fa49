"""The command `python -m tuneloop.runner prefer`: somebody chooses between two answers, blind."""

import argparse
import getpass
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

from tuneloop.runner.collection.blind_pairs import BlindPair, HumanPreference, HumanPreferenceCollector, PairChoice
from tuneloop.runner.collection.preference_files import append_line, read_pairs, read_preferences
from tuneloop.runner.errors import LogRefused, ServiceRefused
from tuneloop.runner.logs.exchange import json_lines
from tuneloop.runner.rewards.chat_messages import ChatMessage, chat_messages
from tuneloop.runner.rewards.reply import text_of
from tuneloop.runner.rewards.visible_text import visible

_KEYS: dict[str, PairChoice] = {"1": "left", "2": "right", "t": "tie", "s": "skip"}

_ASKS = "1 or 2 is better, t: as good, s: skip, q: quit > "

#: What the service says of a preference that it will never take, such as of a reply that was deleted.
_NEVER = frozenset({400, 404, 413, 422})

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None, *, ask: Callable[[str], str] = input) -> int:
    """Run the command; the exit code: 0, 1 for what is refused or away, 2 for a wrong command line, 130 for Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.source and not options.only_pairs:
        options.source = _user(parser)
    try:
        return _run(options, ask)
    except (LogRefused, ServiceRefused, ValueError, OSError) as error:
        _complain(str(error))
        return 1
    except KeyboardInterrupt:
        _complain(f"\nstopped: what was chosen is in {options.to}, and the same command goes on")
        return _INTERRUPTED


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


def _user(parser: argparse.ArgumentParser) -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        parser.error("--source: the system has no name for its user: say who chooses")


def _run(options: argparse.Namespace, ask: Callable[[str], str]) -> int:
    collector = HumanPreferenceCollector(
        options.service, api_key=os.environ.get("TUNELOOP_API_KEY"), source=options.source, seed=options.seed
    )
    try:
        pairs = _Pairs(options, collector)
        if options.only_pairs:
            sys.stdout.write(f"{sum(1 for _ in pairs)} pairs in {pairs.file}\n")
            return 0
        session = _Session(collector, options.to, options.source)
        session.send_unsent()
        session.ask_for(pairs, ask)
        sys.stdout.write(f"{session.summary(pairs)}\n")
        return 1 if session.refused else 0
    finally:
        collector.close()


class _Pairs:
    """The pairs of a file, and those that are to be made: what was sampled once is not sampled again."""

    def __init__(self, options: argparse.Namespace, collector: HumanPreferenceCollector) -> None:
        self.file: Path = options.to.with_name(f"{options.to.name}.pairs")
        self._known = list(read_pairs(self.file))
        self._missing = list(_missing(options, collector, self._known))

    def __len__(self) -> int:
        return len(self._known) + len(self._missing)

    def __iter__(self) -> Iterator[BlindPair]:
        """First those that are known. Each of the others is made when it is its turn."""
        yield from tuple(self._known)
        while self._missing:
            pair = self._missing[0]()
            append_line(self.file, pair)
            self._known.append(pair)
            del self._missing[0]
            yield pair

    def count_without(self, choices: Collection[str]) -> int:
        """How many have none of the choices."""
        return len(self) - sum(each.pair_id in choices for each in self._known)


class _Session:
    """What one person chooses. It is on disk before it is sent: sent again after a break, it counts once."""

    def __init__(self, collector: HumanPreferenceCollector, file: Path, source: str) -> None:
        self._collector, self._file = collector, file
        preferences = read_preferences(file)
        self._unsent = [each for each in preferences.values() if each.preferred is not None and not each.sent]
        self._choices = {pair_id: each.choice for (pair_id, who), each in preferences.items() if who == source}
        #: How many preferences the service will never take.
        self.refused = 0

    def send_unsent(self) -> None:
        """Send what was chosen, by whomever, and not sent."""
        for each in self._unsent:
            self._send(each)

    def ask_for(self, pairs: _Pairs, ask: Callable[[str], str]) -> None:
        """Ask for what was not chosen yet, until there is no more, or somebody wants no more."""
        for number, pair in enumerate(pairs, start=1):
            if pair.pair_id in self._choices:
                continue
            same = pair.texts[0] == pair.texts[1]
            choice = "tie" if same else _choose(pair, f"{number}/{len(pairs)}", ask)
            if choice is None:
                return
            preference = self._collector.preference(pair, choice)
            append_line(self._file, preference)
            self._choices[pair.pair_id] = choice
            self._send(preference)

    def summary(self, pairs: _Pairs) -> str:
        """What was chosen until now."""
        counts = Counter(self._choices.values())
        return (
            f"{counts['left'] + counts['right']} preferences, {counts['tie']} ties, {counts['skip']} skipped, "
            f"{pairs.count_without(self._choices)} left"
        )

    def _send(self, preference: HumanPreference) -> None:
        if preference.preferred is None:
            return
        try:
            sent = self._collector.send(preference)
        except ServiceRefused as error:
            if error.status not in _NEVER:
                kept = f"what was chosen is in {self._file}, and sent when the command goes on"
                raise ServiceRefused(f"{error}; {kept}", status=error.status, code=error.code) from None
            _complain(f"not taken: {preference.preferred}, preferred over {preference.rejected}: {error}")
            self.refused += 1
        else:
            append_line(self._file, sent)


def _missing(
    options: argparse.Namespace, collector: HumanPreferenceCollector, known: Sequence[BlindPair]
) -> Iterator[Callable[[], BlindPair]]:
    """What makes each pair that is not known."""
    if options.replies:
        there = {frozenset(each.ids or ()) for each in known}
        for number, row in json_lines(options.replies):
            ids = _ids(row, f"{options.replies}:{number}")
            if frozenset(ids) not in there:
                there.add(frozenset(ids))
                yield partial(collector.pair_of, *ids)
        return
    if options.questions is None:
        if not known:
            raise ValueError("name --questions with --model and --versions, or --replies")
        return
    if not options.model or not options.versions:
        raise ValueError("--questions needs --model and --versions")
    versions: tuple[int, int] = tuple(options.versions)
    of_these = [each for each in known if sorted(each.versions or ()) == sorted(map(str, versions))]
    asked = {json.dumps(each.messages) for each in of_these}
    for number, row in json_lines(options.questions):
        messages = _question(row, f"{options.questions}:{number}")
        if (question := json.dumps(messages)) not in asked:
            asked.add(question)
            yield partial(collector.sample, messages, options.model, versions, max_tokens=options.max_tokens)


def _ids(row: dict[str, Any], where: str) -> tuple[str, str]:
    a, b = row.get("a"), row.get("b")
    if not isinstance(a, str) or not isinstance(b, str):
        raise LogRefused(f"{where}: the ids of two replies are needed: a and b")
    return a, b


def _question(row: dict[str, Any], where: str) -> list[ChatMessage]:
    if row.get("messages"):
        return chat_messages(row["messages"])
    if not isinstance(question := row.get("question"), str):
        raise LogRefused(f"{where}: a question or messages are needed")
    return [{"role": "user", "content": question}]


def _choose(pair: BlindPair, where: str, ask: Callable[[str], str]) -> PairChoice | None:
    """What somebody answers; None if they want no more."""
    conversation = "\n".join(f"[{each.get('role')}] {text_of(each.get('content'))}" for each in pair.messages)
    for title, text in ((where, conversation), ("1", pair.texts[0]), ("2", pair.texts[1])):
        # Indented, no answer looks like the beginning of the other.
        shown = indent(visible(text, sys.stdout.encoding), "  ")
        sys.stdout.write(f"\n--- {title}\n{shown}\n")
    sys.stdout.write("\n")
    while True:
        try:
            answer = ask(_ASKS).strip().lower()
        except (EOFError, KeyboardInterrupt):
            return None
        if answer == "q":
            return None
        if answer in _KEYS:
            return _KEYS[answer]


def _complain(sentence: str) -> None:
    sys.stderr.write(f"{visible(sentence, sys.stderr.encoding)}\n")
