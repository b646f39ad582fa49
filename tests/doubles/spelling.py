"""An engine double whose tokens are bytes: it says what a test wants, and tells the ids that spell it.

It samples nothing. The prompt of a chat is its messages and tools as JSON.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.doubles.engine import CHAT, MODEL, EngineDouble

Json = dict[str, Any]


def write_tokenizer(model: Path) -> None:
    """A tokenizer.json whose token n is the byte n."""
    letters = _letters()
    vocab = {letter: byte for byte, letter in letters.items()}
    described = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "decoder": {"type": "ByteLevel"}}
    (model / "tokenizer.json").write_text(json.dumps(described))


def _letters() -> dict[int, str]:
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [each for each in range(256) if each not in seen]
    return {each: chr(each) for each in seen} | {each: chr(256 + at) for at, each in enumerate(hidden)}


@dataclass
class SpellingDouble(EngineDouble):
    """`thoughts` are spelled before the reply, and are no part of its text."""

    reply: str = "fine"
    thoughts: str = ""
    arguments: str | None = None  # of a call of `add`

    asked: list[Json] = field(default_factory=list)

    async def _answer(self, scope: Any, body: bytes, send: Any) -> None:
        path = scope["path"]
        request = json.loads(body) if path in {CHAT, "/v1/completions"} else {}
        asked = request.get("messages") or isinstance(request.get("prompt"), str)
        probe = "prompt_logprobs" in request or request.get("top_k") == 1
        if asked and not probe and self.status == 200:
            self.asked.append(request)
            return await self._say(path, request, scope, send)
        await super()._answer(scope, body, send)

    async def _say(self, path: str, request: Json, scope: Any, send: Any) -> None:
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        chat, spelled = path == CHAT, (self.thoughts + self.reply + (self.arguments or "")).encode()
        name = (
            f"{'chatcmpl' if chat else 'cmpl'}-{headers['x-request-id']}" if chat else f"cmpl-{headers['x-request-id']}"
        )
        usage = {"prompt_tokens": 1, "completion_tokens": len(spelled), "total_tokens": len(spelled) + 1}
        head = {"id": name, "object": "chat.completion", "created": 1, "model": MODEL, "usage": usage}
        prompt = list((request["prompt"] if not chat else _template(request)).encode())
        if request.get("stream"):
            return await self._events(head, prompt, spelled, chat, send)
        choice: Json = {"index": 0, "finish_reason": "stop", "token_ids": list(spelled)}
        if chat:
            message: Json = {"role": "assistant", "content": self.reply}
            if self.arguments is not None:
                message["tool_calls"] = [self._call()]
            choice |= {"message": message, "logprobs": _chat_logprobs(spelled)}
            body = {**head, "choices": [choice], "prompt_token_ids": prompt}
        else:
            choice |= {"text": self.reply, "prompt_token_ids": prompt, "logprobs": _text_logprobs(spelled)}
            body = {**head, "choices": [choice]}
        await _send(send, b"application/json", [json.dumps(body).encode()])

    def _call(self) -> Json:
        return {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": self.arguments}}

    async def _events(self, head: Json, prompt: list[int], spelled: bytes, chat: bool, send: Any) -> None:
        """The reply in pieces of three bytes: no piece holds a whole secret."""
        pieces: list[Json] = []
        thought = len(self.thoughts.encode())
        said = thought + len(self.reply.encode())
        for at in range(0, len(spelled), 3):
            part = spelled[at : at + 3]
            text = spelled[max(at, thought) : min(at + 3, said)].decode()
            choice: Json = {"index": 0, "finish_reason": None, "token_ids": list(part)}
            if chat:
                choice |= {"delta": {"content": text}, "logprobs": _chat_logprobs(part)}
                pieces.append({**head, "choices": [choice]})
            else:
                first = {"prompt_token_ids": prompt} if at == 0 else {}
                choice |= {"text": text, "logprobs": _text_logprobs(part), **first}
                pieces.append({**head, "choices": [choice]})
        if chat:
            pieces[0]["prompt_token_ids"] = prompt
        last: Json = {"index": 0, "finish_reason": "stop", "token_ids": None, "logprobs": None}
        last |= (
            {"delta": {"tool_calls": [{"index": 0, **self._call()}]} if self.arguments else {}}
            if chat
            else {"text": ""}
        )
        pieces.append({**head, "choices": [last]})
        events = [f"data: {json.dumps(each)}\n\n".encode() for each in pieces]
        await _send(send, b"text/event-stream; charset=utf-8", [*events, b"data: [DONE]\n\n"])


def _template(request: Json) -> str:
    return json.dumps({name: request.get(name) for name in ("messages", "tools")}, ensure_ascii=False)


def _chat_logprobs(spelled: bytes) -> Json:
    return {"content": [{"token": "", "logprob": -0.5, "bytes": [each], "top_logprobs": []} for each in spelled]}


def _text_logprobs(spelled: bytes) -> Json:
    return {"token_logprobs": [-0.5] * len(spelled)}


async def _send(send: Any, kind: bytes, pieces: list[bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body"})
