"""AgentScope 1.x."""

import asyncio
import json
import sys
from typing import Any

import openai
from agentscope.model import OpenAIChatModel
from serve import ASKED, HURRY_S, TOOLS, refusal, serve


class Client:
    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self._run = asyncio.Runner().run
        self._whole, self._stream = self._chat(stream=False), self._chat(stream=True)

    def _chat(self, *, stream: bool, model: str | None = None, **client: Any) -> OpenAIChatModel:
        return OpenAIChatModel(
            model or self._model,
            api_key="none",
            stream=stream,
            client_kwargs={"base_url": f"{self._url}/v1", **client},
            generate_kwargs={"max_tokens": 99},
        )

    def whole(self) -> dict[str, Any]:
        return _text(self._run(self._whole(ASKED)))

    def streamed(self) -> dict[str, Any]:
        return _text(self._run(self._last()))

    def called(self) -> dict[str, Any]:
        return _call(self._run(self._whole(ASKED, tools=TOOLS, tool_choice="auto")))

    def called_in_stream(self) -> dict[str, Any]:
        return _call(self._run(self._last(tools=TOOLS, tool_choice="auto")))

    async def _last(self, **but: Any) -> Any:
        async for reply in await self._stream(ASKED, **but):  # each holds all that was said until then
            last = reply
        return last

    def unknown_model(self) -> dict[str, Any]:
        try:
            self._run(self._chat(stream=False, model="nope")(ASKED))
        except openai.NotFoundError as error:
            return refusal(error, error.request_id)
        raise AssertionError

    def hurried(self) -> dict[str, Any]:
        try:
            self._run(self._chat(stream=False, timeout=HURRY_S, max_retries=0)(ASKED))
        except openai.APITimeoutError as error:
            return refusal(error, None)
        raise AssertionError

    def streams(self, count: int, until: str) -> list[str]:
        async def read_all() -> list[str]:
            return list(await asyncio.gather(*(self._read(until) for _ in range(count))))

        return self._run(read_all())

    async def _read(self, until: str) -> str:
        stream = await self._stream(ASKED)
        async for reply in stream:
            if until == "middle" and reply.content:
                break
        await stream.aclose()
        return reply.id


def _text(reply: Any) -> dict[str, Any]:
    return {"id": reply.id, "text": reply.content[0]["text"]}


def _call(reply: Any) -> dict[str, Any]:
    [call] = [block for block in reply.content if block["type"] == "tool_use"]
    return {"id": reply.id, "name": call["name"], "arguments": json.dumps(call["input"])}


serve(Client(*sys.argv[1:]))
