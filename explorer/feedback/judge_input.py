"""Recorded replies as a judge reads them: whatever endpoint they came by, as a chat and its answer."""

from collections.abc import Sequence
from typing import Any

import orjson

from tuneloop.explorer.auth import Caller
from tuneloop.explorer.dialects import messages, responses_request
from tuneloop.explorer.dialects.dialect import MESSAGES, RESPONSES, TEXT, Json, ReadConversation, choice_count
from tuneloop.runner.rewards.reply import Message, Reply, calls_of
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.ledger.recording.judging import JudgedExchange


async def reading_of(exchange: JudgedExchange, tenant: str, conversation: ReadConversation) -> Reply:
    """A tenant's reply. Raises RequestRefused if what it answers cannot be read, or is gone."""
    try:
        body = orjson.loads(exchange.request)
        before = await _before(exchange, tenant, body, conversation)
        calls = calls_of({"tool_calls": orjson.loads(exchange.tool_calls or b"[]")})
        tools = [str(each.get("function", each).get("name", "")) for each in body.get("tools") or ()]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RequestRefused(f"the request cannot be read: {type(error).__name__}") from None
    return Reply(
        text=exchange.text,
        messages=tuple(before),
        tool_calls=tuple(calls),
        tools=tuple(tools),
    )


async def _before(
    exchange: JudgedExchange, tenant: str, body: Json, conversation: ReadConversation
) -> Sequence[Message]:
    if exchange.endpoint == TEXT:
        return [{"role": "prompt", "content": _prompt(body, exchange.choice)}]
    if exchange.endpoint == MESSAGES:
        body = messages.to_chat(body)
    elif exchange.endpoint == RESPONSES:
        continued = body.get("previous_response_id")
        previous = await conversation(continued, Caller(tenant=tenant)) if isinstance(continued, str) else ()
        body = responses_request.to_chat(body, previous)
    found: list[Any] = body["messages"]
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise RequestRefused("the request has no messages")
    return found


def _prompt(body: Json, choice: int) -> str:
    """The prompt of a choice: of several prompts each has `n` choices."""
    prompt = body["prompt"]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[choice // choice_count(body)]
    if not isinstance(prompt, str):
        raise RequestRefused("the prompt is token ids, which only the model can read")
    return prompt
