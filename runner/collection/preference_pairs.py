"""What people prefer: pairs of answers shown blind, and sent as feedback."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal
from urllib.parse import quote

import httpx

from tuneloop.runner.errors import ServiceRefused
from tuneloop.runner.http_client import header_of_key
from tuneloop.runner.logs.request_logs import ask_service, stored_turns
from tuneloop.runner.rewards.reply import ChatMessage, chat_messages, text_of

#: A person's answer about two replies, by their places on the page; `skip` leaves it open.
PairChoice = Literal["left", "right", "tie", "skip"]
CHOICES: tuple[PairChoice, ...] = ("left", "right", "tie", "skip")

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindPair:
    """A question with two answers, as they are shown; only `ids` and `versions` say which version wrote which.

    `ids` are the service's ids of the replies, left and right, for feedback; None where they are no replies of it.
    """

    pair_id: str
    messages: tuple[ChatMessage, ...]
    texts: tuple[str, str]
    ids: tuple[str, str] | None = None
    versions: tuple[str, str] | None = None

    @property
    def page(self) -> dict[str, Any]:
        """What a page may show: nothing that reveals which version wrote which answer."""
        return {"pair_id": self.pair_id, "messages": list(self.messages), "left": self.texts[0], "right": self.texts[1]}

    def to_dict(self) -> dict[str, Any]:
        """The row of a file."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanPreference:
    """A person's answer about a pair. `sent`: the service has it as feedback; a tie and a skip are not sent."""

    pair_id: str
    choice: PairChoice
    preferred: str | None = None
    rejected: str | None = None
    source: str | None = None
    sent: bool = False


def arrange(
    messages: Sequence[object], a: tuple[str, str | None, str], b: tuple[str, str | None, str], *, seed: int = 0
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
    """Asks a service for pairs, and sends it which answer was preferred.

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
            completion = self._ask("POST", "/v1/chat/completions", request)
            answers.append(_answer(completion, str(version)))
        return arrange(turns, answers[0], answers[1], seed=self._seed)

    def pair_of(self, a: str, b: str) -> BlindPair:
        """The pair of two replies that the service has stored, by their ids. They must answer one question."""
        stored = [self._ask("GET", _path_of(each)) for each in (a, b)]
        turns = [stored_turns(self._client, self._url + _path_of(each)) for each in (a, b)]
        if turns[0] != turns[1]:
            raise ServiceRefused(f"{a} and {b} do not answer the same question")
        answers = [_answer(each, str(each.get("model"))) for each in stored]
        return arrange(turns[0], answers[0], answers[1], seed=self._seed)

    def record(self, pair: BlindPair, choice: PairChoice) -> HumanPreference:
        """Send a person's choice to the service, once: training by dpo finds it. Raises ValueError."""
        if choice not in CHOICES:
            raise ValueError(f"choice: {choice!r} is none of {', '.join(CHOICES)}")
        made = HumanPreference(pair_id=pair.pair_id, choice=choice, source=self._source)
        if pair.ids is None or choice in ("tie", "skip"):
            return made
        better = 0 if choice == "left" else 1
        preferred, rejected = pair.ids[better], pair.ids[1 - better]
        feedback: dict[str, Any] = {"msg_ids": [preferred], "preferred_over": rejected}
        # The service distinguishes several people under one key by their names.
        feedback["idempotency_key"] = f"prefer-{pair.pair_id}"
        self._ask("POST", "/feedback", feedback | ({"source": self._source} if self._source else {}))
        return replace(made, preferred=preferred, rejected=rejected, sent=True)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return ask_service(self._client, method, self._url + path, json=body)


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
