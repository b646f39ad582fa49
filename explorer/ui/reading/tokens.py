"""The tokens of a reply with their log-probabilities; an engine says how each is written."""

import asyncio
from typing import Any, NamedTuple

import orjson

from tuneloop.explorer.engines.fleet import Fleet
from tuneloop.explorer.routes.passthrough import ask_engine
from tuneloop.shared.errors import EngineError, RequestRefused
from tuneloop.shared.ledger.browsing.exchange_view import TokenView

#: Tokens of one reply that are shown.
MAX_TOKENS = 4_000

_PATIENCE_S = 3.0

#: How tokenizers write a space and a line's end inside of tokens.
_WRITTEN = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"})


class Token(NamedTuple):
    """A token: how it is written, or its id in brackets where nobody could tell. `logprob`: None if not captured."""

    text: str
    id: int
    logprob: float | None


class TokenList(NamedTuple):
    """The tokens of a reply, and their log-probabilities added up, if captured; `named`: they are shown as text."""

    tokens: list[Token]
    total: int
    logprob: float | None
    prompt_tokens: int
    named: bool


async def list_tokens(fleet: Fleet, model: str, view: TokenView) -> TokenList:
    """The tokens of a reply as they are written. Without an engine that can tell, their ids."""
    names = await _names(fleet, model, view)
    tokens = [
        Token(names[place] if place < len(names) else f"[{number}]", number, logprob)
        for place, (number, logprob) in enumerate(zip(view.completion_ids, view.logprobs, strict=True))
    ]
    captured = [each for each in view.logprobs if each is not None]
    total = sum(captured) if len(captured) == len(tokens) else None
    return TokenList(tokens[:MAX_TOKENS], len(tokens), total, view.prompt_tokens, bool(names))


async def _names(fleet: Fleet, model: str, view: TokenView) -> list[str]:
    """How the first tokens are written: those that the engine makes of the reply's text, if they are the same."""
    question = {"model": model, "prompt": view.text, "add_special_tokens": False, "return_token_strs": True}
    try:
        async with asyncio.timeout(_PATIENCE_S):
            answer = await ask_engine(fleet, "POST", "/tokenize", orjson.dumps(question))
    except (EngineError, RequestRefused, TimeoutError):
        return []
    try:
        body: Any = orjson.loads(bytes(answer.body))
        ids, names = body["tokens"], body["token_strs"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return []
    if not isinstance(names, list) or ids != view.completion_ids[: len(ids)] or len(names) != len(ids):
        return []
    return [str(name).translate(_WRITTEN) for name in names]
