"""Collects preferences: shows pairs of answers blind, and sends choices as feedback."""

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

#: A person's choice by the position of the answer; `skip` decides nothing.
PairChoice = Literal["left", "right", "tie", "skip"]
CHOICES: tuple[PairChoice, ...] = ("left", "right", "tie", "skip")

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindPair:
    """A question with two answers in display order; only `ids` and `versions` tell which version wrote which.

    `ids` are the service's ids of the replies, left and right, for feedback; None for replies of other origin.
    """

    pair_id: str
    messages: tuple[ChatMessage, ...]
    texts: tuple[str, str]
    ids: tuple[str, str] | None = None
    versions: tuple[str, str] | None = None

    @property
    def page(self) -> dict[str, Any]:
        """What a page shows: nothing that reveals the versions."""
        return {"pair_id": self.pair_id, "messages": list(self.messages), "left": self.texts[0], "right": self.texts[1]}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanPreference:
    """A choice about a pair. `sent`: the service has it as feedback; a tie and a skip are not sent."""

    pair_id: str
    choice: PairChoice
    preferred: str | None = None
    rejected: str | None = None
    source: str | None = None
    sent: bool = False


def arrange(
    messages: Sequence[object], a: tuple[str, str | None, str], b: tuple[str, str | None, str], *, seed: int = 0
) -> BlindPair:
    """Pair two answers, each (text, reply id, version), in an order fixed by the seed and the question."""
    turns = tuple(chat_messages(list(messages)))
    name = hashlib.sha256(json.dumps([turns, a, b], default=str).encode()).hexdigest()[:16]
    sides = [a, b]
    random.Random(f"{seed}/{name}").shuffle(sides)
    left, right = sides
    ids = (left[1], right[1]) if left[1] and right[1] else None
    return BlindPair(pair_id=name, messages=turns, texts=(left[0], right[0]), ids=ids, versions=(left[2], right[2]))


class HumanPreferenceCollector:
    """Asks a service (`url` without /v1) for pairs, and sends a person's choices as `source`. Raises ServiceRefused."""

    def __init__(self, url: str, *, api_key: str | None = None, source: str | None = None, seed: int = 0) -> None:
        self._url = url.rstrip("/")
        self._source = source
        self._seed = seed
        self._client = httpx.Client(headers=header_of_key(api_key), timeout=_TIMEOUT_S)

    def sample(self, messages: Sequence[object], model: str, versions: tuple[int, int], **body: Any) -> BlindPair:
        """The answers of two versions to a question; `body` has further request fields, such as max_tokens."""
        turns = chat_messages(list(messages))
        answers = []
        for version in versions:
            request = {**body, "model": f"{model}@{version}", "messages": turns}
            answers.append(_answer(self._ask("POST", "/v1/chat/completions", request), str(version)))
        return arrange(turns, answers[0], answers[1], seed=self._seed)

    def pair_of(self, a: str, b: str) -> BlindPair:
        """The pair of two stored replies to one question, by their ids."""
        stored = [self._ask("GET", _path_of(each)) for each in (a, b)]
        turns = [stored_turns(self._client, self._url + _path_of(each)) for each in (a, b)]
        if turns[0] != turns[1]:
            raise ServiceRefused(f"{a} and {b} do not answer the same question")
        answers = [_answer(each, str(each.get("model"))) for each in stored]
        return arrange(turns[0], answers[0], answers[1], seed=self._seed)

    def record(self, pair: BlindPair, choice: PairChoice) -> HumanPreference:
        """Send a choice to the service once, for training by dpo. Raises ValueError."""
        if choice not in CHOICES:
            raise ValueError(f"choice: {choice!r} is none of {', '.join(CHOICES)}")
        made = HumanPreference(pair_id=pair.pair_id, choice=choice, source=self._source)
        if pair.ids is None or choice in ("tie", "skip"):
            return made
        better = 0 if choice == "left" else 1
        preferred, rejected = pair.ids[better], pair.ids[1 - better]
        feedback: dict[str, Any] = {"msg_ids": [preferred], "preferred_over": rejected}
        # The service keeps people under one key apart by `source`.
        feedback["idempotency_key"] = f"prefer-{pair.pair_id}"
        self._ask("POST", "/feedback", feedback | ({"source": self._source} if self._source else {}))
        return replace(made, preferred=preferred, rejected=rejected, sent=True)

    def close(self) -> None:
        self._client.close()

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return ask_service(self._client, method, self._url + path, json=body)


def _path_of(reply_id: str) -> str:
    return f"/v1/chat/completions/{quote(reply_id, safe=':')}"


def _answer(completion: Mapping[str, Any], version: str) -> tuple[str, str, str]:
    """The first choice's text and tool calls, the reply's id, the version."""
    try:
        message = completion["choices"][0]["message"]
        calls = [
            f"[{each['name']}] {each['arguments']}"
            for each in ([each["function"] for each in message.get("tool_calls") or ()])
        ]
        return "\n".join(filter(None, [text_of(message.get("content")), *calls])), str(completion["id"]), version
    except (LookupError, TypeError, AttributeError):
        raise ServiceRefused(f"the service's answer is no chat completion: {str(completion)[:200]}") from None
