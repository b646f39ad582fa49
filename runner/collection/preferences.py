"""What people prefer: pairs shown blind, the command that asks, and the files of both."""

import argparse
import getpass
import hashlib
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any, Literal
from urllib.parse import quote

import httpx

from tuneloop.runner.errors import LogRefused, ServiceRefused
from tuneloop.runner.http_client import header_of_key
from tuneloop.runner.logs.exchange import json_lines
from tuneloop.runner.private_files import append_rows, is_row, split_last_line
from tuneloop.runner.rewards.reply import ChatMessage, chat_messages, text_of
from tuneloop.runner.rewards.visible_text import visible

_TEXTS = ("preferred", "rejected", "source")


#: What somebody says of two answers by their places on the page; `skip` leaves it open.
PairChoice = Literal["left", "right", "tie", "skip"]
CHOICES: tuple[PairChoice, ...] = ("left", "right", "tie", "skip")

_TIMEOUT_S = 120.0

_PAGE = 100  # the most that a list of the service has


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindPair:
    """A question with two answers, as they are shown: who gave which only `ids` and `versions` tell.

    `ids` are the service's ids of the replies, left and right, for feedback; None where they are no replies of it.
    """

    pair_id: str
    messages: tuple[ChatMessage, ...]
    texts: tuple[str, str]
    ids: tuple[str, str] | None = None
    versions: tuple[str, str] | None = None

    @property
    def page(self) -> dict[str, Any]:
        """What a page may show: nothing that tells who gave which answer."""
        return {"pair_id": self.pair_id, "messages": list(self.messages), "left": self.texts[0], "right": self.texts[1]}

    def to_dict(self) -> dict[str, Any]:
        """The row of a file."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanPreference:
    """What somebody said of a pair. `sent`: the service has it as feedback; a tie and a skip are not sent."""

    pair_id: str
    choice: PairChoice
    preferred: str | None = None
    rejected: str | None = None
    source: str | None = None
    sent: bool = False


def arrange(
    messages: Sequence[object],
    a: tuple[str, str | None, str],
    b: tuple[str, str | None, str],
    *,
    seed: int = 0,
) -> BlindPair:
    """Two answers, each (text, id of the reply, version), in an order that the seed and the question decide."""
    turns = tuple(chat_messages(list(messages)))
    name = hashlib.sha256(json.dumps([turns, a, b], default=str).encode()).hexdigest()[:16]
    sides = [a, b]
    random.Random(f"{seed}/{name}").shuffle(sides)
    left, right = sides
    ids = (left[1], right[1]) if left[1] and right[1] else None
    return BlindPair(pair_id=name, messages=turns, texts=(left[0], right[0]), ids=ids, versions=(left[2], right[2]))


class HumanPreferenceCollector:
    """Asks a service for pairs, and tells it which answer was preferred.

    `url` is the service's, without /v1; `source` names who says so. Raises ServiceRefused where the service refuses, or
    is not there.
    """

    def __init__(self, url: str, *, api_key: str | None = None, source: str | None = None, seed: int = 0) -> None:
        self._url = url.rstrip("/")
        self._source = source
        self._seed = seed
        self._client = httpx.Client(headers=header_of_key(api_key), timeout=_TIMEOUT_S)

    def sample(self, messages: Sequence[object], model: str, versions: tuple[int, int], **body: Any) -> BlindPair:
        """Both versions' answers to a question; `body` is more of the request, such as max_tokens."""
        turns = chat_messages(list(messages))
        answers = []
        for version in versions:
            request = {**body, "model": f"{model}@{version}", "messages": turns}
            completion = self._post("/v1/chat/completions", request)
            answers.append(_answer(completion, str(version)))
        return arrange(turns, answers[0], answers[1], seed=self._seed)

    def pair_of(self, a: str, b: str) -> BlindPair:
        """The pair of two replies that the service has stored, by their ids. They must answer one question."""
        stored = [self._get(_path_of(each)) for each in (a, b)]
        turns = [self._messages(each) for each in (a, b)]
        if turns[0] != turns[1]:
            raise ServiceRefused(f"{a} and {b} do not answer the same question")
        answers = [_answer(each, str(each.get("model"))) for each in stored]
        return arrange(turns[0], answers[0], answers[1], seed=self._seed)

    def record(self, pair: BlindPair, choice: PairChoice) -> HumanPreference:
        """What somebody has chosen. A preference is sent to the service, where training by dpo finds it.

        Sent twice, it counts once.
        """
        return self.send(self.preference(pair, choice))

    def preference(self, pair: BlindPair, choice: PairChoice) -> HumanPreference:
        """The same, without sending it. Raises ValueError for a choice that there is not."""
        if choice not in CHOICES:
            raise ValueError(f"choice: {choice!r} is none of {', '.join(CHOICES)}")
        made = HumanPreference(pair_id=pair.pair_id, choice=choice, source=self._source)
        if pair.ids is None or choice in ("tie", "skip"):
            return made
        better = 0 if choice == "left" else 1
        return replace(made, preferred=pair.ids[better], rejected=pair.ids[1 - better])

    def send(self, preference: HumanPreference) -> HumanPreference:
        """Send a preference, in the name of who said it. One that names no replies is returned as it is."""
        if preference.preferred is None:
            return preference
        feedback = {"msg_ids": [preference.preferred], "preferred_over": preference.rejected}
        # The service tells what several people say under one key apart by their names.
        feedback["idempotency_key"] = f"prefer-{preference.pair_id}"
        self._post("/feedback", feedback | ({"source": preference.source} if preference.source else {}))
        return replace(preference, sent=True)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _messages(self, reply_id: str) -> list[ChatMessage]:
        listed = [
            {**each, "content": each.get("content_parts") or each.get("content")} for each in self._pages(reply_id)
        ]
        return chat_messages(listed)

    def _pages(self, reply_id: str) -> Iterator[dict[str, Any]]:
        after: dict[str, str] = {}
        while True:
            query = httpx.QueryParams({"limit": str(_PAGE), **after})
            page = self._get(f"{_path_of(reply_id)}/messages?{query}")
            yield from page["data"]
            if not page.get("has_more"):
                return
            after = {"after": str(page["last_id"])}

    def _get(self, path: str) -> dict[str, Any]:
        return self._ask("GET", path)

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = self._client.request(method, self._url + path, json=body)
            read = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ServiceRefused(f"the service does not answer: {error!r}") from None
        if not answer.is_success or not isinstance(read, dict):
            raise ServiceRefused.of_answer(answer.status_code, read)
        return read


def _path_of(reply_id: str) -> str:
    return f"/v1/chat/completions/{quote(reply_id, safe=':')}"


def _answer(completion: Mapping[str, Any], version: str) -> tuple[str, str, str]:
    """What the first choice said, and the tools that it called; the reply's id; the version."""
    try:
        message = completion["choices"][0]["message"]
        calls = [
            f"[{each['name']}] {each['arguments']}"
            for each in ([each["function"] for each in message.get("tool_calls") or ()])
        ]
        return "\n".join(filter(None, [text_of(message.get("content")), *calls])), str(completion["id"]), version
    except (LookupError, TypeError, AttributeError):
        raise ServiceRefused(f"the service's answer is no chat completion: {str(completion)[:200]}") from None


_KEYS: dict[str, PairChoice] = {"1": "left", "2": "right", "t": "tie", "s": "skip"}

_ASKS = "1 or 2 is better, t: as good, s: skip, q: quit > "

#: What the service says of a preference that it will never take, such as of a reply that was deleted.
_NEVER = frozenset({400, 404, 413, 422})

_INTERRUPTED = 130


def read_pairs(path: Path) -> Iterator[BlindPair]:
    """The pairs of a file; none if there is no file. Raises LogRefused for a line that is none."""
    for where, row in _rows(path):
        try:
            tuples: dict[str, Any] = {name: _two(row, name) for name in ("texts", "ids", "versions")}
            if tuples["texts"] is None or not all(isinstance(each, dict) for each in row["messages"]):
                raise ValueError("texts and messages are needed")
            yield BlindPair(pair_id=str(row["pair_id"]), messages=tuple(row["messages"]), **tuples)
        except (KeyError, TypeError, ValueError) as error:
            raise LogRefused(f"{where}: not a pair: {error!r}") from None


def read_preferences(path: Path) -> dict[tuple[str, str | None], HumanPreference]:
    """What each said last of each pair, by the pair's id and who says it; nothing if there is no file.

    Raises LogRefused for a line that is no preference.
    """
    preferences = (_preference(where, row) for where, row in _rows(path))
    return {(each.pair_id, each.source): each for each in preferences}


def append_line(path: Path, row: BlindPair | HumanPreference) -> None:
    """Append a row to a file. It is on disk when this returns."""
    append_rows(path, [asdict(row)])


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    whole, last = split_last_line(path.read_bytes() if path.exists() else b"")
    lines = whole.split(b"\n") + ([last] if is_row(last) else [])
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not is_row(line):
            raise LogRefused(f"{path}:{number}: a line must be a JSON object")
        yield f"{path}:{number}", json.loads(line)


def _two(row: dict[str, Any], name: str) -> tuple[str, str] | None:
    value = row.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{name}: two are needed")
    return str(value[0]), str(value[1])


def _preference(where: str, row: dict[str, Any]) -> HumanPreference:
    known = {each.name for each in fields(HumanPreference)}
    if unknown := sorted(row.keys() - known):
        raise LogRefused(f"{where}: not a preference: {unknown[0]!r} is none of {', '.join(sorted(known))}")
    texts = all(isinstance(row.get(name), str | None) for name in _TEXTS)
    if not isinstance(row.get("pair_id"), str) or row.get("choice") not in CHOICES or not texts:
        raise LogRefused(f"{where}: not a preference: it needs a pair_id, and a choice of {', '.join(CHOICES)}")
    return HumanPreference(**row)


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
