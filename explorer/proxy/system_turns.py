"""Instructions that a chat template would lose are merged into the first system message.

Of `developer` turns and of later `system` turns some templates raise, and others skip them without a word. An engine is
asked what its template makes of such turns: those that are in the prompt are left as they are.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from tuneloop.explorer.dialects import messages as anthropic
from tuneloop.explorer.engines.fleet import Engine, Fleet, least_busy
from tuneloop.shared.errors import EngineError, RequestRefused

Json = dict[str, Any]

_SYSTEM = "system"
_INSTRUCTING = (_SYSTEM, "developer")

#: For so many seconds an answer is trusted: engines of others may be started anew with another template.
_TRUSTED_S = 60.0
_TIMEOUT_S = 5.0

#: A turn of an instruction, and the same turn with a longer one: in the prompt they differ, unless it is not there.
_SHORT, _LONG = "Yes.", "Yes. 1 2 3"
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

#: No thinking budget is larger.
_NO_LIMIT = 1 << 62


class _Shape(NamedTuple):
    """Where a conversation has instructions: the first turn's role, if it instructs, and those of later turns."""

    first: str
    later: tuple[str, ...]
    tools: bool


class SystemTurns:
    """Merges the turns of requests whose place in the prompt the engines' template does not know."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: dict[_Shape, tuple[float, bool | None]] = {}

    async def merge(self, body: Json) -> tuple[Json, int]:
        """The body of a chat, or of a response, for the engine; and how many turns were merged.

        Raises RequestRefused where no instruction would reach the prompt.
        """
        own = "messages" if "messages" in body else "input"
        turns = body.get(own)
        if not isinstance(turns, list) or not all(isinstance(each, dict) for each in turns):
            return body, 0
        if own == "input" and body.get("instructions"):
            turns = [{"role": _SYSTEM, "content": body["instructions"]}, *turns]
        merged, count = await self._merge(body, turns)
        if not count:
            return body, 0
        return {name: value for name, value in body.items() if name != "instructions"} | {own: merged}, count

    async def merge_counted(self, body: Json) -> tuple[Json, int]:
        """The same of a request that counts the tokens of Anthropic's messages."""
        turns = body.get("messages")
        if not isinstance(turns, list) or not any(
            isinstance(each, dict) and each.get("role") == _SYSTEM for each in turns
        ):
            return body, 0
        chat = anthropic.to_chat({**body, "max_tokens": _NO_LIMIT})
        merged, count = await self._merge(chat, chat["messages"])
        if not count:
            return body, 0
        others = [each for turn in turns for each in _without_text(turn)]
        return body | {"system": merged[0]["content"], "messages": others}, count

    async def _merge(self, body: Json, turns: Sequence[Json]) -> tuple[list[Json], int]:
        shape = _shape_of(turns, bool(body.get("tools")))
        if shape is None or await self._reaches(shape):
            return [], 0
        merged = _with_one_system(turns)
        if merged and await self._reaches(_Shape(_SYSTEM, (), shape.tools)) is False:
            raise RequestRefused(
                "the model's chat template has no place for instructions: write them into a user message",
                code="instructions_not_in_prompt",
                param="messages",
            )
        return merged, len(turns) + (shape.first != _SYSTEM) - len(merged) if merged else 0

    async def _reaches(self, shape: _Shape) -> bool | None:
        """Whether every instruction of such a conversation is in the prompt, as was last known.

        None: the engine refuses such a conversation, or nobody could be asked yet.
        """
        until, found = self._known.get(shape, (0.0, None))
        engine = least_busy(self._fleet.engines)
        if engine is None or time.monotonic() < until:
            return found
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                found = await _ask(engine, shape)
        except (EngineError, TimeoutError):
            return found
        self._known[shape] = (time.monotonic() + _TRUSTED_S, found)
        return found


def merged_header(count: int) -> list[tuple[bytes, bytes]]:
    """The header that tells a client how many turns were merged, if any."""
    return [(b"x-tuneloop-merged-system", b"%d" % count)] if count else []


def _shape_of(turns: Sequence[Json], tools: bool) -> _Shape | None:
    """None where the only instruction is the first system message, if any."""
    roles = [turn.get("role") for turn in turns]
    first = roles[0] if roles and roles[0] in _INSTRUCTING else ""
    later = tuple(each for each in _INSTRUCTING if each in roles[1:])
    return _Shape(first, later, tools) if later or first not in ("", _SYSTEM) else None


def _with_one_system(turns: Sequence[Json]) -> list[Json]:
    """The turns with one system message, the first; none where the engine refuses what one of them says."""
    texts: list[str] = []
    for turn in turns:
        if turn.get("role") in _INSTRUCTING:
            content = turn.get("content") or ""
            parts = [{"text": content}] if isinstance(content, str) else content
            if not isinstance(parts, list):
                return []
            texts.append("\n".join(_text(part) for part in parts))
    system = {"role": _SYSTEM, "content": "\n\n".join(filter(None, texts))}
    return [system, *(turn for turn in turns if turn.get("role") not in _INSTRUCTING)]


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if isinstance(text, str):
        return text
    raise RequestRefused(
        "the model's chat template takes one system message, of text: an instruction here is more than text",
        code="unsupported",
        param="messages",
    )


def _without_text(turn: Json) -> list[Json]:
    """A turn of Anthropic's: of a system turn what it changes of the tools."""
    if turn["role"] != _SYSTEM:
        return [turn]
    content = turn["content"] if isinstance(turn["content"], list) else []
    changes = [block for block in content if block["type"] != "text"]
    return [turn | {"content": changes}] if changes else []


async def _ask(engine: Engine, shape: _Shape) -> bool | None:
    """The same of one engine; False too where it merges them itself, which nobody would tell the client.

    Raises EngineError.
    """
    roles = [*filter(None, [shape.first]), "user", *shape.later, *(["user"] if shape.later else [])]
    short = [{"role": role, "content": _SHORT} for role in roles]
    longer = [
        [*short[:place], {"role": role, "content": _LONG}, *short[place + 1 :]]
        for place, role in enumerate(roles)
        if role != "user"
    ]
    merged = [_with_one_system(short)] if len(longer) > 1 or shape.first != _SYSTEM else []
    read = await asyncio.gather(*(_tokens(engine, turns, shape.tools) for turns in (short, *longer, *merged)))
    return None if None in read else read[0] not in read[1:]


async def _tokens(engine: Engine, turns: Sequence[Json], tools: bool) -> list[int] | None:
    """What the engine reads of a conversation, None where it refuses it. Raises EngineError."""
    body = {"messages": turns} | ({"tools": [_TOOL]} if tools else {})
    headers = {"Content-Type": "application/json"}
    reply = await engine.http.request("POST", "/tokenize", orjson.dumps(body), headers)
    try:
        answer = await reply.read()
    finally:
        reply.close()
    if reply.status == 400:
        return None
    try:
        found: list[int] = orjson.loads(answer)["tokens"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise EngineError(f"/tokenize: its answer cannot be read (status {reply.status})") from None
    return found
