"""An exchange as OpenAI's stored completion: the `chat.completion` object, its messages, and what it is found by.

Pure. Fields of a request that are only passed on stay the JSON that they were.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Raw

#: OpenAI's bounds of metadata.
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512

_NULL = Raw(b"null")


class StoredRequest(msgspec.Struct, frozen=True):
    """The fields of the request that the object repeats."""

    model: Any = None
    metadata: Any = None
    user: Raw = _NULL
    tools: Raw = _NULL
    tool_choice: Raw = _NULL
    response_format: Raw = _NULL
    service_tier: Raw = _NULL
    seed: Raw = _NULL
    temperature: Raw = _NULL
    top_p: Raw = _NULL
    presence_penalty: Raw = _NULL
    frequency_penalty: Raw = _NULL


class _SearchFields(msgspec.Struct, frozen=True):
    """What an exchange is found by."""

    model: Any = None
    metadata: Any = None


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's answer."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: Raw = _NULL
    function_call: None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `finish_reason` is None for one that was cut off."""

    index: int
    message: AssistantMessage
    finish_reason: str | None
    logprobs: None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class StoredCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The object, in the order of OpenAI's fields."""

    object: str = "chat.completion"
    id: str
    model: str
    created: int
    request_id: str
    tool_choice: Raw
    usage: Usage
    seed: Raw
    top_p: Raw
    temperature: Raw
    presence_penalty: Raw
    frequency_penalty: Raw
    system_fingerprint: None = None
    input_user: Raw
    service_tier: Raw
    tools: Raw
    metadata: Mapping[str, str]
    choices: tuple[Choice, ...]
    response_format: Raw


class StoredChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice as the ledger holds it."""

    choice: int
    text: str
    tool_calls: bytes | None
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    temperature: float


class StoredExchange(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange as the ledger holds it; `metadata` None: that of the request."""

    msg_id: str
    received_at: float
    request: bytes
    metadata: str | None
    choices: tuple[StoredChoice, ...]


_requests = msgspec.json.Decoder(StoredRequest)
_search_fields = msgspec.json.Decoder(_SearchFields)


def completion(stored: StoredExchange, *, default_model: str) -> StoredCompletion:
    """The object of an exchange. `default_model` answered a request that named none."""
    request = _read(stored.request)
    changed = stored.metadata
    prompt_tokens = max((each.prompt_tokens for each in stored.choices), default=0)
    completion_tokens = sum(each.completion_tokens for each in stored.choices)
    sampled_at = next((each.temperature for each in stored.choices), 1.0)
    return StoredCompletion(
        id=stored.msg_id,
        model=request.model if isinstance(request.model, str) else default_model,
        created=int(stored.received_at),
        request_id=stored.msg_id,
        tool_choice=request.tool_choice,
        usage=Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens),
        seed=request.seed,
        top_p=_or(request.top_p, b"1.0"),
        temperature=_or(request.temperature, msgspec.json.encode(sampled_at)),
        presence_penalty=_or(request.presence_penalty, b"0.0"),
        frequency_penalty=_or(request.frequency_penalty, b"0.0"),
        input_user=request.user,
        service_tier=request.service_tier,
        tools=request.tools,
        metadata=metadata_as_text(request.metadata) if changed is None else msgspec.json.decode(changed),
        choices=tuple(_choice(each) for each in stored.choices),
        response_format=request.response_format,
    )


def messages(stored: StoredExchange) -> list[dict[str, Any]]:
    """The messages of the request, each with an id of its own, the oldest first."""
    try:
        messages = msgspec.json.decode(stored.request)["messages"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return []
    found = enumerate(each for each in messages if isinstance(each, dict)) if isinstance(messages, list) else ()
    return [_message(f"{stored.msg_id}-{number}", each) for number, each in found]


def metadata_as_text(metadata: object) -> dict[str, str]:
    """A request's metadata as OpenAI's: a value that is no string becomes its JSON."""
    if not isinstance(metadata, dict):
        return {}
    return {
        str(key): (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":")))
        for key, value in metadata.items()
        if value is not None
    }


def as_json(pairs: Mapping[str, str]) -> str:
    """Metadata as it is kept."""
    return msgspec.json.encode(pairs).decode()


def tags_of(tenant: str, request: bytes, metadata: Mapping[str, str] | None = None) -> set[bytes]:
    """What an exchange is found by. `metadata` stands in the place of the request's, where it was changed."""
    try:
        read = _search_fields.decode(request)
    except msgspec.MsgspecError:  # an imported row may hold anything
        read = _SearchFields()
    found = {tag_of_model(tenant, read.model)} if isinstance(read.model, str) else set()
    pairs = metadata_as_text(read.metadata) if metadata is None else metadata
    return found | {tag_of_pair(tenant, key, value) for key, value in _findable(pairs)}


@lru_cache
def tag_of_model(tenant: str, model: str) -> bytes:
    """By which the completions of a model are found."""
    return _digest(tenant, "model", model)


def tag_of_pair(tenant: str, key: str, value: str) -> bytes:
    """By which the completions with this in their metadata are found."""
    return _digest(tenant, "metadata", key, value)


def _findable(pairs: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """OpenAI's clients cannot ask for more, and a request may bring any number."""
    for key, value in list(pairs.items())[:MAX_PAIRS]:
        if len(key) <= MAX_KEY and len(value) <= MAX_VALUE:
            yield key, value


def _digest(*words: str) -> bytes:
    return hashlib.blake2b(json.dumps(words).encode(), digest_size=16).digest()


def _read(request: bytes) -> StoredRequest:
    try:
        return _requests.decode(request)
    except msgspec.MsgspecError:  # an imported row may hold anything
        return StoredRequest()


def _or(value: Raw, neutral: bytes) -> Raw:
    return value if bytes(value) != b"null" else Raw(neutral)


def _choice(choice: StoredChoice) -> Choice:
    calls = choice.tool_calls
    content = choice.text if choice.text or not calls else None
    message = AssistantMessage(content=content, tool_calls=Raw(calls) if calls else _NULL)
    return Choice(index=choice.choice, message=message, finish_reason=choice.finish_reason)


def _message(its_id: str, message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    fields = {"content": None if parts is not None else content, "name": message.get("name"), "content_parts": parts}
    return {"role": message.get("role"), **message, **fields, "id": its_id}
