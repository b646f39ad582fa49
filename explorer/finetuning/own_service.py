"""Asks this service over HTTP, as any client does."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import httpx

from tuneloop.shared.errors import EngineError, RequestRefused
from tuneloop.shared.finetuning.graders import AskModel

#: The answers to a request that will never do. To others the same request may get another answer in a moment.
_REFUSALS = {400, 413, 422}

_T = TypeVar("_T")


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a route answers. Raises RequestRefused for a request that will never do, EngineError otherwise."""
    try:
        answer = await client.post(path, json=body)
        found = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise EngineError(f"the service does not answer: {type(error).__name__}") from None
    if answer.status_code == 200:
        return dict(found)
    message = str((found.get("error") or {}).get("message"))
    if answer.status_code in _REFUSALS:
        raise RequestRefused(message, status=answer.status_code)
    raise EngineError(message)


async def gather(*parts: Awaitable[_T]) -> list[_T]:
    """The results of all; where one fails, the others are ended before that is raised."""
    tasks = [asyncio.ensure_future(each) for each in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def asking(client: httpx.AsyncClient) -> AskModel:
    """What asks a model for a score, and raises what `post` does; nothing is kept of it."""

    async def ask(body: dict[str, Any]) -> str:
        answer = await post(client, "/v1/chat/completions", body | {"store": False})
        return answer["choices"][0]["message"].get("content") or ""

    return ask
