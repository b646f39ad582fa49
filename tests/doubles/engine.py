"""A vLLM engine that samples nothing: it replays the answers of vLLM 0.32, byte for byte but for ids and model.

`recorded/` holds the answers to one prompt at temperature 0, each once as a client requested it ("plain") and once with
what the explorer adds to every request ("captured"). Who offers tools gets a call of `add`. Faults are plain attributes
that a test sets.
"""

import asyncio
import itertools
import json
import zlib
from array import array
from base64 import b64encode
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import jinja2
from pydantic import TypeAdapter

from tests.doubles.serving import reset, serving
from tuneloop.explorer.engines.packing.wire import HEADER, PACKED
from tuneloop.explorer.engines.proof.fingerprint import Fingerprint
from tuneloop.explorer.engines.proof.vllm_worker import EXTENSION, INSTANCE_ID, METHOD
from tuneloop.explorer.versions.safetensors import adapter_fingerprints_of, fingerprints_of, tensors
from tuneloop.shared.checkpoints import ADAPTER_CONFIG, read_manifest

MODEL = "t"
CHAT = "/v1/chat/completions"
PASSED = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")

_RECORDED = Path(__file__).parent / "recorded"
_starts = itertools.count(1_700_000_000.25)
_LOAD = "/collective_rpc"
_LOAD_ADAPTER, _UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def recorded(name: str) -> bytes:
    """A recorded answer of the real engine."""
    return (_RECORDED / name).read_bytes()


def pieces(stream: bytes) -> list[bytes]:
    """The events of a recorded stream, each with its blank line."""
    return [event + b"\n\n" for event in stream.split(b"\n\n") if event]


def logprobs_of(weights: Path, prompt_ids: Sequence[int]) -> list[float]:
    """Made-up log-probabilities of each id but the first; a folder that is no checkpoint is the base model."""
    name = weights.parent.name if weights.parent.name.startswith("global_step_") else "base"
    return [
        -(1 + zlib.crc32(f"{name}:{position}:{token}".encode()) % 1000 / 250)
        for position, token in enumerate(prompt_ids[1:])
    ]


def fingerprint_of(weights: Path) -> Fingerprint:
    """The sums of the weights in a folder, in float32."""
    return fingerprints_of(tensors(weights), tied=False)["float32"]


def adapter_fingerprint_of(weights: Path) -> Fingerprint:
    """The same of an adapter."""
    config = json.loads((weights / ADAPTER_CONFIG).read_bytes())
    return adapter_fingerprints_of(tensors(weights), scale=config["lora_alpha"] / config["r"])["float32"]


@dataclass(frozen=True)
class ReceivedRequest:
    """A chat request as it arrived."""

    headers: dict[str, str]
    body: dict[str, Any]
    weights: Path


@dataclass
class EngineDouble:
    """One engine. Set an attribute to change how it behaves from the next request on."""

    weights: Path = Path("/models/tiny")
    url: str = ""

    piece_pause_s: float = 0.0
    text_pause_s: float = 0.0
    texts: int = 0  # that are being read
    most_texts: int = 0
    cut_after: int | None = None  # pieces, then the connection breaks
    end_after: int | None = None  # pieces, then a clean end without [DONE]
    stalls_after: int | None = None  # pieces, then nothing more until the client leaves
    hangs: bool = False
    steps_while_it_hangs: bool = False  # its counters move each time that they are asked for
    silent: bool = False  # hangs, and does not say either that it is healthy
    status: int = 200
    answer: bytes | None = None  # instead of any reply to a chat
    probe_fails: bool = False
    answer_to_probe: bytes | None = None  # while it has the weights of a checkpoint
    no_token_ids: bool = False
    resets: bool = False
    resets_next: int = 0  # so many requests lose their connection before anything is answered
    dead: bool = False
    refuses_load_of: set[str] = field(default_factory=set)  # names of checkpoints; their loading is answered with 500
    dies_of: set[str] = field(default_factory=set)
    dies_at_pauses: set[int] = field(default_factory=set)  # counted from 1
    dies_at_resume: bool = False
    keeps_old_weights: bool = False
    no_tokenizer: bool = False
    template: str = ""  # its chat template: with one, it reads chats at /tokenize, and texts otherwise
    max_model_len: int = 4096
    keeps_prefixes: bool = False  # as an engine whose prefix cache outlives its weights
    quotes: Callable[[dict[str, Any]], bool] = lambda request: False  # refuses such requests, and quotes them
    fails_at: Callable[[dict[str, Any]], bool] = lambda request: False  # answers such requests with 500
    raw_logprobs: bool = False  # as without --logprobs-mode processed_logprobs
    drafts: bool = False  # as with --speculative-config
    drafts_at_any_temperature: bool = False  # as vLLM does on a CPU with speculative decoding
    asked_for_one: int = 0  # how often it was looked at which log-probabilities it tells
    answers_probes_by_manifest: bool = False  # as an engine does whose weights are really the trainer's
    load_s: float = 0.0
    drifts_at_load: float = 0.0  # nats that it is further off after each load in place, as vLLM is with some models
    drift: float = 0.0
    says: dict[str, str] = field(default_factory=dict)  # by name of the checkpoint: what its whole replies say
    ends_by: str = "stop"  # why those replies end
    adapters: dict[str, Path] = field(default_factory=dict)  # by the name that they were loaded under

    chats: list[ReceivedRequest] = field(default_factory=list)
    posts: list[str] = field(default_factory=list)
    passed: list[tuple[str, bytes]] = field(default_factory=list)  # the path and body of each request to PASSED
    prefixes: dict[tuple[int, ...], Path] = field(default_factory=dict)  # by whose weights each was read
    left: int = 0  # clients that went before their reply had ended
    loading: int = 0
    paused: bool = False
    began_at: float = field(default_factory=lambda: next(_starts))  # seconds since 1970, as a real engine's metrics say
    answers_metrics: bool = True
    metrics_asked: int = 0
    answers_server_info: bool = True
    extended: bool = False  # its workers have our extension
    packs: bool = False  # as with our plugin
    servers: int = 1  # API servers, which answer in turn
    adapter_one_unit_off: bool = False  # in the sums of its adapters
    bases_summed: int = 0  # fingerprints of all that it holds
    adapters_summed: int = 0
    rendered: bytes | None = None  # what its renderer answers; none: it was started without
    renders: list[dict[str, Any]] = field(default_factory=list)
    grammars_given: int = 0  # text completions under a grammar

    def start_again(self) -> None:
        """A new life at the same place, as far as others can tell: with the base model, and unpaused."""
        self.weights, self.began_at, self.paused, self.drift = type(self).weights, next(_starts), False, 0.0
        self.adapters.clear()
        self.prefixes.clear()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await _lifespan(receive, send)
        if self.resets_next:
            self.resets_next -= 1
            return reset(scope)
        if self.dead or self.resets:
            return reset(scope)
        leaving, body = await _body(receive)
        gone = asyncio.ensure_future(_gone(receive)) if not leaving else asyncio.ensure_future(asyncio.sleep(0))
        answering = asyncio.ensure_future(self._answer(scope, body, send))
        try:
            await asyncio.wait({gone, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.left += 1
            else:
                answering.result()
        except ConnectionAbortedError:
            reset(scope)
        finally:
            for task in (gone, answering):
                task.cancel()
            await asyncio.gather(gone, answering, return_exceptions=True)

    async def _answer(self, scope: Any, body: bytes, send: Any) -> None:
        path = scope["path"]
        if path == CHAT:
            return await self._chat(scope, body, send)
        if path == "/v1/completions":
            return await self._probe(scope, body, send)
        if path in PASSED:
            self.passed.append((path, body))
            self.texts += 1
            self.most_texts = max(self.most_texts, self.texts)
            await asyncio.sleep(self.text_pause_s)
            self.texts -= 1
            if self.no_tokenizer:
                return await _send_reply(send, 400, recorded("error_json.json"))
            try:
                question = json.loads(body)
                text = self.prompt_of(**question) if self.template else question["prompt"]
                ids = list(text.encode())
            except (ValueError, TypeError, LookupError, AttributeError, jinja2.TemplateError):
                return await _send_reply(send, 400, recorded("error_json.json"))
            answer = {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids}
            if json.loads(body).get("return_token_strs"):
                answer["token_strs"] = [chr(each).replace(" ", "Ġ") for each in ids]
            return await _send_reply(send, 200, json.dumps(answer).encode())
        if path.endswith("/render"):
            self.renders.append(json.loads(body))
            return await _send_reply(send, 200 if self.rendered else 403, self.rendered or recorded("error_model.json"))
        if path == "/health":
            await _until(lambda: not self.silent)
            return await _send_reply(send, 200, b"")
        if path in {"/metrics/", "/server_info", "/version", "/v1/models"}:
            return await _send_reply(send, *self._about(path))
        query = {key: values[0] for key, values in parse_qs(scope["query_string"].decode()).items()}
        await _send_reply(send, *await self._control(path, query, body))

    def prompt_of(self, messages: Sequence[dict[str, Any]], **others: Any) -> str:
        """What its chat template makes of a conversation. Raises TemplateError."""

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        template = jinja2.Template(self.template, trim_blocks=True, lstrip_blocks=True)
        return template.render(messages=messages, tools=others.get("tools"), raise_exception=raise_exception)

    def _about(self, path: str) -> tuple[int, bytes]:
        """What the engine says of itself."""
        self.metrics_asked += path == "/metrics/"
        if path == "/metrics/" and self.answers_metrics and self.servers == 1:
            started = f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {self.began_at}\n"
            drafts = "vllm:spec_decode_num_drafts_total 0.0\n" * (self.drafts or self.drafts_at_any_temperature)
            steps = self.metrics_asked * self.steps_while_it_hangs
            return 200, (started + drafts + f'vllm:generation_tokens_total{{engine="0"}} {steps}\n').encode()
        if path == "/server_info" and self.answers_server_info:
            extension = EXTENSION if self.extended else ""
            instance = f"{self.began_at}" if self.servers == 1 else f"{next(_starts)}"
            config = {
                "instance_id": instance,
                "parallel_config": {"worker_extension_cls": extension, "_api_process_count": self.servers},
            }
            return 200, json.dumps({"vllm_config": config}).encode()
        if path == "/version":
            return 200, b'{"version":"0.32.0"}'
        if path == "/v1/models":
            return 200, self._models()
        return 404, b'{"detail":"Not Found"}'

    async def _control(self, path: str, query: dict[str, str], body: bytes) -> tuple[int, bytes]:
        self.posts.append(path)
        if path == "/pause":
            assert query == {"mode": "keep", "clear_cache": "false"}
            if self.posts.count(path) in self.dies_at_pauses:
                self.dead = True
                raise ConnectionAbortedError
            self.paused = True
            return 200, b'{"status":"paused"}'
        if path == "/resume":
            if self.dies_at_resume:
                self.dead = True
                raise ConnectionAbortedError
            self.paused = False
            return 200, b'{"status":"resumed"}'
        if path == "/reset_prefix_cache":
            assert query == {"reset_running_requests": "true"}
            if not self.keeps_prefixes:
                self.prefixes.clear()
            return 200, b'{"success":true}'
        if path == _LOAD and json.loads(body)["method"] in {INSTANCE_ID, METHOD}:
            self.posts.pop()
            return self._extension(json.loads(body))
        if path == _LOAD:
            return await self._load(Path(json.loads(body)["kwargs"]["weights_path"]))
        if path in {_LOAD_ADAPTER, _UNLOAD_ADAPTER}:
            return self._change_adapters(path, **json.loads(body))
        return 404, b'{"detail":"Not Found"}'

    def _extension(self, asked: dict[str, Any]) -> tuple[int, bytes]:
        """What our extension of its worker answers."""
        assert self.extended
        if asked["method"] == INSTANCE_ID:
            return 200, json.dumps({"results": [f"worker {self.began_at}"]}).encode()
        known = asked.get("kwargs", {}).get("but", ())
        there = {name: weights for name, weights in self.adapters.items() if name not in known}
        self.adapters_summed += len(there)
        adapters = {name: dict(adapter_fingerprint_of(weights)) for name, weights in there.items()}
        for each in adapters.values():
            each["adapter 0"] += self.adapter_one_unit_off
        sums: Mapping[str, int] | None = {}
        if asked.get("kwargs", {}).get("base", True):
            self.bases_summed += 1
            sums = fingerprint_of(self.weights) if self.weights.exists() else None
        share = {"dtype": "float32", "sums": sums, "adapters": adapters}
        return 200, json.dumps({"results": [share]}).encode()

    async def _load(self, weights: Path) -> tuple[int, bytes]:
        assert self.paused
        self.loading += 1
        await asyncio.sleep(self.load_s)
        self.loading -= 1
        if weights.parent.name in self.dies_of:
            self.dead = True
            raise ConnectionAbortedError
        if weights.parent.name in self.refuses_load_of:
            return 500, b'{"error":{"message":"no","type":"InternalServerError","param":null,"code":500}}'
        self.drift += self.drifts_at_load
        if not self.keeps_old_weights:
            self.weights = weights
        return 200, b'{"results":[null]}'

    def _change_adapters(self, path: str, lora_name: str, lora_path: str = "") -> tuple[int, bytes]:
        if path == _UNLOAD_ADAPTER:
            return (200, b"Success") if self.adapters.pop(lora_name, None) else (404, recorded("error_model.json"))
        if lora_name in self.adapters:
            return 400, b'{"error":{"message":"The lora adapter has already been loaded.","code":400}}'
        if Path(lora_path).parent.name in self.refuses_load_of:
            return 404, b'{"error":{"message":"Loading lora failed","type":"NotFoundError","param":null,"code":404}}'
        self.adapters[lora_name] = Path(lora_path)
        return 200, b"Success"

    def _models(self) -> bytes:
        answer = json.loads(recorded("models.json"))
        if not self.adapters:
            return recorded("models.json")
        answer["data"] += [answer["data"][0] | {"id": name, "parent": MODEL} for name in self.adapters]
        return json.dumps(answer).encode()

    def _weights_of(self, request: dict[str, Any]) -> Path:
        return self.adapters.get(str(request.get("model")), self.weights)

    async def _probe(self, scope: Any, body: bytes, send: Any) -> None:
        request = json.loads(body)
        if request["model"] not in {MODEL, *self.adapters}:
            return await _send_reply(send, 404, recorded("error_model.json"))
        if self.probe_fails:
            return await _send_reply(send, 500, b'{"error":{"message":"no","code":500}}')
        self.grammars_given += "structured_outputs" in request
        reply = json.loads(recorded("completions_probe.json"))
        if request.get("top_k") == 1:
            self.asked_for_one += 1
            answer = -2.5 if self.raw_logprobs else 0.0
            reply["choices"][0]["logprobs"] = {
                "tokens": ["x"],
                "token_logprobs": [answer],
                "top_logprobs": [{"x": answer}],
            }
            return await _send_reply(send, 200, json.dumps(reply).encode())
        [choice] = reply["choices"]
        if "prompt_logprobs" in request:
            logprobs = self._logprobs(self._weights_of(request), request["prompt"])
            rows = [
                {
                    str(each): {"logprob": logprob, "rank": 1, "decoded_token": "x"}
                    for each, logprob in _alternatives(token, of_token, temperature=1.0)
                }
                for token, of_token in zip(request["prompt"][1:], logprobs, strict=True)
            ]
            choice["prompt_logprobs"] = [None, *rows]
        else:
            ids = [1] * request["max_tokens"]
            weights = self._weights_of(request)
            if weights is self.weights:
                weights = self.prefixes.setdefault(tuple(request["prompt"]), weights)
            answer = self._logprobs(weights, [*request["prompt"], *ids])[-len(ids) :]
            # vLLM tells those of temperature 1 at temperature 0.
            temperature = 1.0 if self.drafts_at_any_temperature else request.get("temperature") or 1.0
            told = [dict(_alternatives(1, of_token, temperature=temperature)) for of_token in answer]
            named = [{f"token_id:{token}": logprob for token, logprob in each.items()} for each in told]
            choice |= {"token_ids": ids, "logprobs": {"token_logprobs": answer, "top_logprobs": named}}
            asked = (HEADER.lower().encode(), PACKED.encode()) in scope["headers"]
            if self.packs and asked and request["logprobs"] == 0:
                choice["logprobs"] = {"token_logprobs": [], "packed": b64encode(array("f", answer).tobytes()).decode()}
        published = self._weights_of(request).parent.name.startswith("global_step_")
        await _send_reply(send, 200, (published and self.answer_to_probe) or json.dumps(reply).encode())

    def _logprobs(self, weights: Path, ids: list[int]) -> list[float]:
        found = [each - self.drift for each in logprobs_of(weights, ids)]
        if self.answers_probes_by_manifest and (weights.parent / "manifest.json").exists():
            right = read_manifest(weights.parent).probe.logprobs
            found[: len(right)] = right
        return found

    async def _chat(self, scope: Any, body: bytes, send: Any) -> None:
        headers = {key.decode(): value.decode("latin-1") for key, value in scope["headers"]}
        try:
            request = json.loads(body)
        except ValueError:
            return await _send_reply(send, 400, recorded("error_json.json"))
        if refusal := _refusal(request, {MODEL, *self.adapters}):
            return await _send_reply(send, *refusal)
        self.chats.append(ReceivedRequest(headers, dict(request), self._weights_of(request)))
        request |= _coerced(request)
        if self.quotes(request):
            error = {"message": f"1 error: 'input': {body.decode()}", "type": "Bad Request", "code": 400}
            return await _send_reply(send, 400, json.dumps({"error": error}).encode())
        await _until(lambda: not (self.hangs or self.silent or self.paused))
        if self.fails_at(request):
            return await _send_reply(send, 500, b'{"error":{"message":"no","code":500}}')
        if self.status != 200 or self.answer is not None:
            return await _send_reply(send, self.status, self.answer or b'{"error":{"message":"no","code":500}}')
        reply = self._substituted(recorded(_name(request, captured=not self.no_token_ids)), headers)
        reply = reply.replace(f'"model":"{MODEL}"'.encode(), f'"model":"{request["model"]}"'.encode())
        if request.get("stream"):
            return await self._stream([piece for piece in pieces(reply) if _is_requested(piece, request)], send)
        name = self._weights_of(request).parent.name
        if name in self.says:
            answer = json.loads(reply)
            [choice] = answer["choices"]
            choice["message"]["content"], choice["finish_reason"] = self.says[name], self.ends_by
            reply = json.dumps(answer).encode()
        await asyncio.sleep(self.piece_pause_s)
        await _send_reply(send, 200, reply, cut=self.cut_after is not None)

    def _substituted(self, reply: bytes, headers: dict[str, str]) -> bytes:
        return reply.replace(b"chatcmpl-recorded", b"chatcmpl-" + headers.get("x-request-id", "own").encode())

    async def _stream(self, reply: list[bytes], send: Any) -> None:
        await send(_start(200, b"text/event-stream; charset=utf-8"))
        for number, piece in enumerate(reply):
            if number == self.cut_after:
                raise ConnectionAbortedError
            if number == self.end_after:
                break
            if number == self.stalls_after:
                await asyncio.Event().wait()
            await asyncio.sleep(self.piece_pause_s)
            await _until(lambda: not self.paused)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})


def _alternatives(token: int, logprob: float, *, temperature: float) -> Iterator[tuple[int, float]]:
    """A token, and another one that is less probable by 1 nat at temperature 1."""
    yield token, logprob
    yield token + 1, logprob - 1 / temperature


def _name(request: dict[str, Any], *, captured: bool) -> str:
    """Which recording answers a request."""
    stem, kind = ("stream", "sse") if request.get("stream") else ("whole", "json")
    if isinstance(request.get("tool_choice"), dict):
        stem += "_tools"
    elif request.get("tools") and request.get("tool_choice") != "none":
        stem += "_calls"
    elif request.get("n") == 2:
        stem += "_n2"
    elif request.get("top_logprobs"):
        stem += "_logprobs"
    elif request.get("stream") and not (request.get("stream_options") or {}).get("include_usage"):
        stem += "_nousage"
    wants = captured and request.get("return_token_ids"), request.get("logprobs")
    if all(wants):
        return f"{stem}_captured.{kind}"
    if wants[0]:
        return f"{stem}_ids.{kind}"
    return f"{stem}.{kind}" if stem.endswith("logprobs") else f"{stem}_plain.{kind}"


def _is_requested(piece: bytes, request: dict[str, Any]) -> bool:
    """Whether the client requested a chunk: some recordings have a usage that only some requests include."""
    return b'"choices":[]' not in piece or bool((request.get("stream_options") or {}).get("include_usage"))


def _coerced(request: dict[str, Any]) -> dict[str, Any]:
    """The fields that decide about the reply, as vLLM's pydantic models take them."""
    kinds = {"stream": _BOOL, "logprobs": _BOOL, "return_token_ids": _BOOL, "n": _INT}
    return {name: kind.validate_python(request[name]) for name, kind in kinds.items() if name in request}


_BOOL: TypeAdapter[bool | None] = TypeAdapter(bool | None)
_INT: TypeAdapter[int | None] = TypeAdapter(int | None)


def _refusal(request: Any, models: Container[str]) -> tuple[int, bytes] | None:
    """vLLM's answer to what is no chat request."""
    messages = request.get("messages") if isinstance(request, dict) else None
    chat = isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages)
    if not chat or not isinstance(request.get("model"), str):
        return 400, recorded("error_nomsg.json")
    return (404, recorded("error_model.json")) if request.get("model") not in models else None


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the test changes it from another thread
        await asyncio.sleep(0.005)


async def _body(receive: Any) -> tuple[bool, bytes]:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return True, body
        body += message.get("body", b"")
        if not message.get("more_body"):
            return False, body


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _start(status: int, kind: bytes, *more: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *more]}


async def _send_reply(send: Any, status: int, body: bytes, *, cut: bool = False) -> None:
    await send(_start(status, b"application/json", (b"content-length", str(len(body)).encode())))
    if cut:
        await send({"type": "http.response.body", "body": body[:10], "more_body": True})
        raise ConnectionAbortedError
    await send({"type": "http.response.body", "body": body})


class EnginePlace:
    """Where an engine is served, one after the other: a server takes longer to stop than most tests."""

    def __init__(self) -> None:
        self.double = EngineDouble()
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.double(scope, receive, send)

    def fresh(self) -> EngineDouble:
        """A new engine at this place, instead of the one before it."""
        self.double = EngineDouble(url=self.url)
        return self.double


@contextmanager
def engine_place() -> Iterator[EnginePlace]:
    """A place for engines, up until the block ends."""
    place = EnginePlace()
    with serving(place) as place.url:
        yield place
