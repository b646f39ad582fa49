"""LangChain's ChatOpenAI."""

import json
import sys
from functools import reduce
from operator import add
from typing import Any

import openai
from langchain_openai import ChatOpenAI
from serve import HURRY_S, TOOLS, refusal, serve


class Client:
    def __init__(self, url: str, model: str) -> None:
        self._of = {"base_url": f"{url}/v1", "api_key": "none", "model": model}
        # LangChain gives streamed replies ids of its own.
        self._chat = ChatOpenAI(**self._of, max_tokens=12, include_response_headers=True)

    def whole(self) -> dict[str, Any]:
        reply = self._chat.invoke("3+4=")
        assert reply.response_metadata["id"] == _named(reply)
        return {"id": _named(reply), "text": reply.content}

    def streamed(self) -> dict[str, Any]:
        reply = reduce(add, self._chat.stream("3+4="))
        return {"id": _named(reply), "text": reply.content}

    def called(self) -> dict[str, Any]:
        return self._call(self._chat.bind_tools(TOOLS).invoke("3+4="))

    def called_in_stream(self) -> dict[str, Any]:
        return self._call(reduce(add, self._chat.bind_tools(TOOLS).stream("3+4=")))

    def _call(self, reply: Any) -> dict[str, Any]:
        [call] = reply.tool_calls
        return {"id": _named(reply), "name": call["name"], "arguments": json.dumps(call["args"])}

    def unknown_model(self) -> dict[str, Any]:
        try:
            ChatOpenAI(**self._of | {"model": "nope"}).invoke("3+4=")
        except openai.NotFoundError as error:
            return refusal(error, error.request_id)
        raise AssertionError

    def hurried(self) -> dict[str, Any]:
        try:
            ChatOpenAI(**self._of, timeout=HURRY_S, max_retries=0).invoke("3+4=")
        except openai.APITimeoutError as error:
            return refusal(error, None)
        raise AssertionError

    def streams(self, count: int, until: str) -> list[str]:
        return [self._read(until) for _ in range(count)]

    def _read(self, until: str) -> str:
        stream = self._chat.stream("3+4=")
        named = ""
        for piece in stream:
            named = named or _named(piece)
            if until == "middle" and piece.content:
                break
            if until == "finish" and piece.response_metadata.get("finish_reason"):
                break
        stream.close()
        return named


def _named(reply: Any) -> str:
    return reply.response_metadata["headers"]["x-request-id"]


serve(Client(*sys.argv[1:]))
