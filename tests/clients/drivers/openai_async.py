"""openai-python, asynchronous."""

import asyncio
import sys
from typing import Any

import openai
from serve import ASKED, HURRY_S, TOOLS, refusal, serve


class Client:
    def __init__(self, url: str, model: str) -> None:
        self._model = model
        self._run = asyncio.Runner().run
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")

    async def _ask(self, **but: Any) -> Any:
        asked = {"model": self._model, "messages": ASKED, "max_tokens": 12}
        return await self._client.chat.completions.create(**asked | but)

    def whole(self) -> dict[str, Any]:
        reply = self._run(self._ask())
        return {"id": reply.id, "text": reply.choices[0].message.content}

    def streamed(self) -> dict[str, Any]:
        async def read() -> list[Any]:
            return [piece async for piece in await self._ask(stream=True)]

        pieces = self._run(read())
        return {"id": pieces[-1].id, "text": "".join(each.choices[0].delta.content or "" for each in pieces)}

    def called(self) -> dict[str, Any]:
        reply = self._run(self._ask(tools=TOOLS, max_tokens=99))
        [call] = reply.choices[0].message.tool_calls
        return {"id": reply.id, "name": call.function.name, "arguments": call.function.arguments}

    def called_in_stream(self) -> dict[str, Any]:
        async def read() -> Any:
            asked = {"model": self._model, "messages": ASKED, "tools": TOOLS, "max_tokens": 99}
            async with self._client.chat.completions.stream(**asked) as stream:
                return await stream.get_final_completion()

        reply = self._run(read())
        [call] = reply.choices[0].message.tool_calls
        return {"id": reply.id, "name": call.function.name, "arguments": call.function.arguments}

    def unknown_model(self) -> dict[str, Any]:
        try:
            self._run(self._ask(model="nope"))
        except openai.NotFoundError as error:
            return refusal(error, error.request_id)
        raise AssertionError

    def hurried(self) -> dict[str, Any]:
        hurried = self._client.with_options(timeout=HURRY_S, max_retries=0)
        try:
            self._run(hurried.chat.completions.create(model=self._model, messages=ASKED))
        except openai.APITimeoutError as error:
            return refusal(error, None)
        raise AssertionError

    def streams(self, count: int, until: str) -> list[str]:
        async def read_all() -> list[str]:
            return list(await asyncio.gather(*(self._read(until) for _ in range(count))))

        return self._run(read_all())

    async def _read(self, until: str) -> str:
        async with await self._ask(stream=True) as stream:
            async for piece in stream:
                [choice] = piece.choices
                if (until == "middle" and choice.delta.content) or (until == "finish" and choice.finish_reason):
                    break
        return piece.id


serve(Client(*sys.argv[1:]))
