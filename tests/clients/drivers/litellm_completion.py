"""LiteLLM as a library."""

import sys
from typing import Any

import litellm
from serve import ASKED, HURRY_S, TOOLS, refusal, serve


class Client:
    def __init__(self, url: str, model: str) -> None:
        self._asked = {
            "model": f"openai/{model}",
            "api_base": f"{url}/v1",
            "api_key": "none",
            "messages": ASKED,
            "max_tokens": 12,
        }

    def _ask(self, **but: Any) -> Any:
        return litellm.completion(**self._asked | but)

    def whole(self) -> dict[str, Any]:
        reply = self._ask(num_retries=2)
        return {"id": reply.id, "text": reply.choices[0].message.content}

    def streamed(self) -> dict[str, Any]:
        pieces = list(self._ask(stream=True))
        return {"id": pieces[-1].id, "text": "".join(each.choices[0].delta.content or "" for each in pieces)}

    def responded(self) -> dict[str, Any]:
        asked = {name: value for name, value in self._asked.items() if name not in {"messages", "max_tokens"}}
        reply = litellm.responses(**asked, input="3+4=", max_output_tokens=12)
        return {"id": reply.id, "header": reply._hidden_params["additional_headers"]["llm_provider-x-request-id"]}

    def called(self) -> dict[str, Any]:
        return self._call(self._ask(tools=TOOLS, max_tokens=99))

    def called_in_stream(self) -> dict[str, Any]:
        pieces = list(self._ask(tools=TOOLS, max_tokens=99, stream=True))
        return self._call(litellm.stream_chunk_builder(pieces))

    def _call(self, reply: Any) -> dict[str, Any]:
        [call] = reply.choices[0].message.tool_calls
        return {"id": reply.id, "name": call.function.name, "arguments": call.function.arguments}

    def unknown_model(self) -> dict[str, Any]:
        try:
            self._ask(model="openai/nope")
        except litellm.NotFoundError as error:
            return refusal(error, error.litellm_response_headers["x-request-id"])
        raise AssertionError

    def hurried(self) -> dict[str, Any]:
        try:
            self._ask(timeout=HURRY_S, max_retries=0)
        except litellm.Timeout as error:
            return refusal(error, None)
        raise AssertionError

    def streams(self, count: int, until: str) -> list[str]:
        return [self._read(until) for _ in range(count)]

    def _read(self, until: str) -> str:
        stream = self._ask(stream=True)
        for piece in stream:
            if until == "middle" and piece.choices[0].delta.content:
                stream.completion_stream.close()
                break
        return piece.id


serve(Client(*sys.argv[1:]))
