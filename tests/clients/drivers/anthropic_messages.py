"""Anthropic's Python client."""

import json
import sys
from typing import Any

import anthropic
from serve import ADD, ASKED, HURRY_S, PARAMETERS, refusal, serve

TOOLS = [{"name": ADD["name"], "description": ADD["description"], "input_schema": PARAMETERS}]


class Client:
    def __init__(self, url: str, model: str) -> None:
        self._asked = {"model": model, "messages": ASKED, "max_tokens": 12}
        self._client = anthropic.Anthropic(base_url=url, api_key="none")

    def _ask(self, **but: Any) -> Any:
        return self._client.messages.create(**self._asked | but)

    def _stream(self, **but: Any) -> Any:
        return self._client.messages.stream(**self._asked | but)

    def whole(self) -> dict[str, Any]:
        reply = self._ask()
        return {"id": reply.id, "text": reply.content[0].text}

    def streamed(self) -> dict[str, Any]:
        with self._stream() as stream:
            text = "".join(stream.text_stream)
            return {"id": stream.get_final_message().id, "text": text}

    def called(self) -> dict[str, Any]:
        return self._call(self._ask(tools=TOOLS))

    def called_in_stream(self) -> dict[str, Any]:
        with self._stream(tools=TOOLS) as stream:
            return self._call(stream.get_final_message())

    def _call(self, reply: Any) -> dict[str, Any]:
        [call] = [block for block in reply.content if block.type == "tool_use"]
        return {"id": reply.id, "name": call.name, "arguments": json.dumps(call.input)}

    def unknown_model(self) -> dict[str, Any]:
        try:
            self._ask(model="nope")
        except anthropic.NotFoundError as error:
            return refusal(error, error.request_id)
        raise AssertionError

    def hurried(self) -> dict[str, Any]:
        hurried = self._client.with_options(timeout=HURRY_S, max_retries=0)
        try:
            hurried.messages.create(**self._asked)
        except anthropic.APITimeoutError as error:
            return refusal(error, None)
        raise AssertionError

    def streams(self, count: int, until: str) -> list[str]:
        return [self._read(until) for _ in range(count)]

    def _read(self, until: str) -> str:
        with self._stream() as stream:
            for event in stream:
                if until == "middle" and event.type == "content_block_delta":
                    break
            return stream.current_message_snapshot.id


serve(Client(*sys.argv[1:]))
