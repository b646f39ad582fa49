"""Asks an engine's renderer which grammar it holds replies to, so that the trainer can rebuild it."""

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson
import structlog

from tuneloop.explorer.dialects.dialect import CHAT, TEXT
from tuneloop.explorer.engines.fleet import Engine
from tuneloop.explorer.engines.vllm import EngineControl
from tuneloop.explorer.proxy.request import Request
from tuneloop.explorer.transcript import Sampling
from tuneloop.shared.errors import EngineError
from tuneloop.shared.experience import Grammar
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: Of a request, what its grammar depends on.
_DECISIVE = (
    *("model", "tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs"),
    *("stop_token_ids", "chat_template_kwargs", "reasoning_effort"),
)
#: Instead of the prompt.
_STAND_IN: Mapping[str, object] = {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}

#: Grammars that are remembered, each of so many characters at most; of larger ones the engine is asked each time.
_REMEMBERED, _LARGEST = 1024, 64 << 10
#: How long an engine may take to return one, in seconds.
_TIMEOUT_S = 5.0


async def give_first_grammar(control: EngineControl) -> None:
    """Have an engine enforce grammars by xgrammar, as the trainer does: its first one decides about all."""
    if control.rebuilds_grammars:
        with contextlib.suppress(EngineError):  # that engine enforces none
            body = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "a"}}
            await control.query("/v1/completions", **body)


class _UnknownGrammar(Exception):
    """The message says why a grammar cannot be known, or not be rebuilt."""


class Grammars:
    def __init__(self, settings: Settings) -> None:
        self._asks = settings.explorer.rebuilds_grammars
        self._found: OrderedDict[bytes, Grammar | None] = OrderedDict()
        self._reasons: set[str] = set()

    async def resolve(self, engine: Engine, request: Request) -> Sampling:
        sampling = request.sampling
        if not (self._asks and sampling.by_grammar and sampling.drop_reason is None):
            return sampling
        if request.writer.transcript.broken or request.dialect.upstream_path not in {CHAT, TEXT}:
            return sampling
        try:
            grammar = await self._grammar_of(engine, request)
        except _UnknownGrammar as unknown:
            if str(unknown) not in self._reasons:
                self._reasons.add(str(unknown))
                log.warning("grammar_unknown", engine=engine.number, reason=str(unknown))
            return sampling
        return sampling._replace(unsampled=None, grammar=grammar)

    async def _grammar_of(self, engine: Engine, request: Request) -> Grammar | None:
        path, upstream = request.dialect.upstream_path, orjson.loads(request.upstream_body)
        decisive = {name: upstream[name] for name in _DECISIVE if upstream.get(name) is not None}
        decisive |= {name: value for name, value in _STAND_IN.items() if name in upstream}
        body = orjson.dumps(decisive)
        key = hashlib.blake2b(path.encode() + body).digest()
        if key in self._found:
            self._found.move_to_end(key)
            return self._found[key]
        found = await _render(engine, f"{path}/render", body)
        if found is None or len(found.spec) <= _LARGEST:
            self._found[key] = found
            if len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)
        return found


async def _render(engine: Engine, path: str, body: bytes) -> Grammar | None:
    """The grammar of a request, None if the engine holds its reply to none. Raises _UnknownGrammar."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reply = await engine.http.request("POST", path, body, {"Content-Type": "application/json"})
            try:
                answer = await reply.read()
            finally:
                reply.close()
    except (EngineError, TimeoutError) as error:
        raise _UnknownGrammar(f"the engine did not return it: {str(error) or type(error).__name__}") from error
    if reply.status != 200:
        raise _UnknownGrammar(f"the engine answered {reply.status}; it needs --enable-scale-out")
    try:
        rendered = orjson.loads(answer)
        return _grammar(rendered[0] if isinstance(rendered, list) else rendered)
    except (LookupError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise _UnknownGrammar(f"the engine's answer cannot be read: {error!r}") from error


def _grammar(rendered: Mapping[str, Any]) -> Grammar | None:
    params = rendered["sampling_params"]
    constraints = params.get("structured_outputs") or {}
    kinds = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
    found = [(kind, constraints[kind]) for kind in kinds if constraints.get(kind) is not None]
    if not found:
        return None
    if rendered.get("reasoning_parser_kwargs") is not None:
        raise _UnknownGrammar("a reasoning parser decides where it begins")
    kind, spec = found[0]
    ends = tuple(params.get("stop_token_ids") or ())
    match kind:
        case "json":
            # As the engine writes it: the order of a schema's keys is the order of the reply's.
            text = spec if isinstance(spec, str) else orjson.dumps(spec).decode()
            return msgspec.convert({"kind": kind, "spec": text, "stop_ids": ends}, Grammar)
        case "json_object" if spec:
            return Grammar(kind="json", spec='{"type": "object"}', stop_ids=ends)
        case "regex" | "structural_tag":
            return msgspec.convert({"kind": kind, "spec": spec, "stop_ids": ends}, Grammar)
        case _:
            raise _UnknownGrammar(f"it is a {kind}, which is not rebuilt")
