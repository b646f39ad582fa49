"""People's preferences: two answers to a question side by side, blind and in random order, sent as feedback for dpo."""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from tuneloop.runner.errors import LogRefused, ServiceRefused
from tuneloop.runner.logs.exchange import json_lines
from tuneloop.runner.rewards.chat_messages import ChatMessage, chat_messages
from tuneloop.runner.rewards.reply import text_of

#: What somebody says of two answers by their places on the page; `skip` leaves it open.
PairChoice = Literal["left", "right", "tie", "skip"]
CHOICES: tuple[PairChoice, ...] = ("left", "right", "tie", "skip")

_TIMEOUT_S = 120.0


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
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT_S)

    def sample(self, messages: Sequence[object], model: str, versions: tuple[int, int], **body: Any) -> BlindPair:
        """Both versions' answers to a question; `body` is more of the request, such as max_tokens."""
        turns = chat_messages(list(messages))
        answers = []
        for version in versions:
            request = {**body, "model": f"{model}@{version}", "messages": turns}
            completion = self._post("/v1/chat/completions", request)
            answers.append((_text_in(completion), str(completion["id"]), str(version)))
        return arrange(turns, answers[0], answers[1], seed=self._seed)

    def pair_of(self, a: str, b: str) -> BlindPair:
        """The pair of two replies that the service has stored, by their ids. They must answer one question."""
        stored = [self._get(f"/v1/chat/completions/{each}") for each in (a, b)]
        turns = [self._messages(each) for each in (a, b)]
        if turns[0] != turns[1]:
            raise ServiceRefused(f"{a} and {b} do not answer the same question")
        answers = [(_text_in(each), str(each["id"]), str(each.get("model"))) for each in stored]
        return arrange(turns[0], answers[0], answers[1], seed=self._seed)

    def record(self, pair: BlindPair, choice: PairChoice) -> HumanPreference:
        """What somebody has chosen. A preference is sent to the service, where training by dpo finds it.

        Sent twice, it counts once.
        """
        if choice not in CHOICES:
            raise ValueError(f"choice: {choice!r} is none of {', '.join(CHOICES)}")
        if choice in ("tie", "skip"):
            return HumanPreference(pair_id=pair.pair_id, choice=choice, source=self._source)
        better = 0 if choice == "left" else 1
        if pair.ids is None:
            return HumanPreference(pair_id=pair.pair_id, choice=choice, source=self._source)
        preferred, rejected = pair.ids[better], pair.ids[1 - better]
        feedback = {"msg_ids": [preferred], "preferred_over": rejected, "idempotency_key": f"prefer-{pair.pair_id}"}
        self._post("/feedback", feedback | ({"source": self._source} if self._source else {}))
        return HumanPreference(
            pair_id=pair.pair_id,
            choice=choice,
            preferred=preferred,
            rejected=rejected,
            source=self._source,
            sent=True,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _messages(self, reply_id: str) -> list[ChatMessage]:
        listed = self._get(f"/v1/chat/completions/{reply_id}/messages?limit=100")["data"]
        return chat_messages([{**each, "content": each.get("content_parts") or each.get("content")} for each in listed])

    def _get(self, path: str) -> dict[str, Any]:
        return self._ask("GET", path)

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = self._client.request(method, self._url + path, json=body)
            read = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ServiceRefused(f"the service does not answer: {error!r}") from None
        if not answer.is_success or not isinstance(read, dict):
            raise ServiceRefused.of_answer(answer.status_code, read)
        return read


def _text_in(completion: Mapping[str, Any]) -> str:
    """What the first choice said, and the tools that it called."""
    message = completion["choices"][0]["message"]
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return "\n".join(
        filter(None, [text_of(message.get("content")), *(f"[{each['name']}] {each['arguments']}" for each in calls)])
    )


# Files, from which a session goes on after a break.


def read_pairs(path: Path) -> Iterator[BlindPair]:
    """The pairs of a file of JSON lines. Raises LogRefused for a line that is none."""
    for number, row in json_lines(path):
        try:
            tuples: dict[str, Any] = {name: _pair(row.get(name)) for name in ("texts", "ids", "versions")}
            yield BlindPair(pair_id=str(row["pair_id"]), messages=tuple(row["messages"]), **tuples)
        except (KeyError, TypeError, ValueError) as error:
            raise LogRefused(f"{path}:{number}: not a pair: {error!r}") from None


def read_preferences(path: Path) -> dict[str, HumanPreference]:
    """What was said already, by pair; nothing if there is no file. Raises LogRefused."""
    if not path.exists():
        return {}
    return {str(row["pair_id"]): HumanPreference(**row) for _, row in json_lines(path)}


def append_lines(path: Path, rows: Iterable[BlindPair | HumanPreference]) -> None:
    """Append rows to a file of JSON lines, each of them whole."""
    with path.open("a", encoding="utf-8", errors="replace") as file:
        for each in rows:
            file.write(json.dumps(asdict(each), ensure_ascii=False) + "\n")


def _pair(value: object) -> tuple[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("two are needed")
    return str(value[0]), str(value[1])
