"""httpx, with nothing above it. Retries and exceptions are its user's."""

import json
import sys
from typing import Any

import httpx
from serve import ASKED, HURRY_S, TOOLS, refusal, serve

CHAT = "/v1/chat/completions"


class Client:
    def __init__(self, url: str, model: str) -> None:
        self._asked = {"model": model, "messages": ASKED, "max_tokens": 12}
        self._http = httpx.Client(base_url=url, timeout=30)

    def _ask(self, **but: Any) -> Any:
        reply = self._http.post(CHAT, json=self._asked | but)
        reply.raise_for_status()
        return reply.json()

    def whole(self) -> dict[str, Any]:
        reply = self._ask()
        return {"id": reply["id"], "text": reply["choices"][0]["message"]["content"]}

    def streamed(self) -> dict[str, Any]:
        pieces = list(self._pieces())
        return {"id": pieces[-1]["id"], "text": "".join(_delta(each).get("content") or "" for each in pieces)}

    def called(self) -> dict[str, Any]:
        reply = self._ask(tools=TOOLS)
        [call] = reply["choices"][0]["message"]["tool_calls"]
        return {"id": reply["id"], **call["function"]}

    def called_in_stream(self) -> dict[str, Any]:
        pieces = list(self._pieces(tools=TOOLS))
        functions = [call["function"] for each in pieces for call in _delta(each).get("tool_calls") or ()]
        said = {key: "".join(each.get(key) or "" for each in functions) for key in ("name", "arguments")}
        return {"id": pieces[-1]["id"], **said}

    def unknown_model(self) -> dict[str, Any]:
        try:
            self._ask(model="nope")
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 404:
                raise
            told = error.response.json()["error"]
            return refusal(error, error.response.headers["x-request-id"]) | {"message": told["message"]}
        raise AssertionError

    def hurried(self) -> dict[str, Any]:
        try:
            self._http.post(CHAT, json=self._asked, timeout=HURRY_S)
        except httpx.ReadTimeout as error:
            return refusal(error, None)
        raise AssertionError

    def streams(self, count: int, until: str) -> list[str]:
        return [self._read(until) for _ in range(count)]

    def _read(self, until: str) -> str:
        pieces = self._pieces()
        for piece in pieces:
            if until == "middle" and _delta(piece).get("content"):
                break
            if until == "finish" and piece["choices"][0]["finish_reason"]:
                break
        pieces.close()
        return piece["id"]

    def _pieces(self, **but: Any) -> Any:
        """What the stream says; at [DONE] the connection is closed, whatever may come."""
        with self._http.stream("POST", CHAT, json=self._asked | {"stream": True} | but) as reply:
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    return
                if line:
                    yield json.loads(line.removeprefix("data: "))


def _delta(piece: dict[str, Any]) -> dict[str, Any]:
    return piece["choices"][0]["delta"]


serve(Client(*sys.argv[1:]))
