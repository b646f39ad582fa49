"""Parses requests for replies: what goes upstream, who writes the reply, and what is recorded of the two.

The trainer recomputes log softmax(logits / temperature) of token ids. A reply that was sampled from anything else, such
as a nucleus or a grammar, is marked with the reason: methods that learn from any reply take it, policy gradients do
not. A reply that answers more than token ids is for none. docs/explain.md lists the reasons.

The labels of a request stand beside its messages: task, run, user, priority, and whether to train on its reply. Ours
begin with `tuneloop_`, and a wrong value is refused. Without the prefix they are words that an application may have
used for itself: a value that cannot be a label of ours is the application's own.
"""

import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import orjson

from tuneloop.explorer.auth import Caller, RunBinding
from tuneloop.explorer.dialects import dialect as dialects
from tuneloop.explorer.dialects.dialect import MESSAGES, Dialect, ReplyWriter, SystemTurns, choice_count
from tuneloop.explorer.edge import ClientRequest, Headers
from tuneloop.explorer.engines import fleet, vllm
from tuneloop.explorer.engines.model_routes import ModelRoute, PolicyKey, RoutingKey
from tuneloop.explorer.engines.packing import wire
from tuneloop.explorer.engines.prefix_affinity import hash_prefixes
from tuneloop.explorer.http.bodies import (
    as_utf8,
    check_template,
    coerce_bool,
    coerce_float,
    equals,
    finite_number,
    flag_of,
    id_of,
    optional_bool,
    parse_body,
    wrong_type,
)
from tuneloop.explorer.limits import RequestMeter
from tuneloop.explorer.proxy.media import refuse_remote_files, with_own_uuids
from tuneloop.explorer.proxy.side_requests import device_of, is_side_request
from tuneloop.explorer.recorder import CaptureChoice
from tuneloop.explorer.transcript import ReplyIdSigner, Sampling
from tuneloop.shared import engine_flags
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import LENGTHS, Stamp, person_name, stamp, steady_clock, trace_keys
from tuneloop.shared.settings.base_model import limit_of
from tuneloop.shared.settings.feedback import TenantSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.spans import RequestTrace

T = TypeVar("T")

#: Larger than any sensible priority, and safe in every database.
MAX_PRIORITY = 1e9

#: Bytes of a request's metadata, as JSON: it is stored with each reply, and listed.
MAX_METADATA_BYTES = 64 << 10

#: Of the keys of `metadata` that can mean nothing else.
PREFIX = "tuneloop_"

#: The names under which a request may keep its reply out of training, and the header.
_TRAIN_HEADER = b"x-tuneloop-train"
_CONSENT = ("train", f"{PREFIX}train")

#: vLLM bounds no `n`: with 1024 choices of one prompt, all other requests waited for eleven seconds.
_MOST_OF_A_PROMPT = 128

#: How often openai's and Anthropic's libraries have asked before.
_RETRIES = b"x-stainless-retry-count"

_ANY_TENANT = TenantSettings()

#: Fields for the explorer, which an engine does not get.
_EXPLORER_FIELDS = frozenset({"store", "metadata"})

#: Fields that say what an engine does beside this request: they are the operator's. `vllm_xargs` may hold any of them.
_OPERATORS_FIELDS = ("kv_transfer_params", "ec_transfer_params", "request_id", "session_id", "priority", "vllm_xargs")

#: What vLLM leaves out without a word: the reply is to all that was sent.
_LEFT_OUT = ("context_management", "mcp_servers", "web_search_options", "prediction")

#: Replies may come from a cache only to those of one salt, so that no tenant learns by its clock what another has sent.
_SALT = "cache_salt"

#: Without one of these no request names a file, nor goes on with a conversation that does. JSON may write any letter of
#: them as an escape.
_MEDIA_WORDS = (b"_url", b'"image', b'"video', b'"audio', b'"source"', b'"uuid"', b"previous_response_id", b"\\u")


#: Parameters that change the distribution, or where it is stopped, with the values that leave it alone.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "thinking_token_budget": (-1,),
    "repetition_detection": (),
    "logits_processors": ([],),
    "continue_final_message": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}

_BUDGET = "thinking_token_budget"

#: Of them, those that only cut tokens off: an engine with our plug-in returns which are left.
TRUNCATING = frozenset({"top_p", "top_k", "min_p"})

#: Parameters with which the reply answers not, or not only, the prompt's token ids, with the values that do nothing.
BEYOND_IDS: Mapping[str, tuple[object, ...]] = {
    "prompt_embeds": ([],),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}

#: Parts of a message that become token ids; vLLM takes others, such as images.
_WORDS = ("text", "input_text", "output_text", "refusal", "thinking")

#: vLLM decodes greedily at 0, and raises what is above it to this.
_LOWEST = 0.01


class Labels(NamedTuple):
    """The labels of a request; `train` False keeps its reply out of training. `ignored` are keys of other values."""

    task_id: str | None
    run_id: str | None
    user: str | None
    priority: float
    train: bool
    ignored: tuple[str, ...] = ()
    trace_id: str | None = None

    @property
    def names(self) -> tuple[str | None, ...]:
        """By which a trace of another tool finds the reply."""
        return self.task_id, self.run_id, self.trace_id


class Request(NamedTuple):
    """A parsed request. `started` is monotonic, `received_at` seconds since 1970.

    `added_fields` names what the engine gets beside the client's fields; `plain_body` encodes the request without them.
    `not_stored` is why its reply is not kept, `clamped_field` the limit of tokens that was lowered; empty if none is.
    """

    dialect: Dialect
    body: bytes
    upstream_body: bytes
    plain_body: Callable[[], bytes]
    added_fields: tuple[str, ...]
    msg_id: str
    choices: int
    stream: bool
    store: bool
    sampling: Sampling
    labels: Labels
    ignored_fields: tuple[str, ...]
    caller: Caller
    request_id: str
    received_at: float
    stamp: Stamp
    started: float
    writer: ReplyWriter
    meter: RequestMeter
    prefix_hashes: tuple[int, ...] = ()
    route: ModelRoute = ModelRoute(None, None, None)
    model: str = ""
    is_retry: bool = False
    trace: RequestTrace | None = None
    traces: tuple[str, ...] = ()
    merged_turns: int = 0
    not_stored: str = ""
    clamped_field: str = ""

    @property
    def key(self) -> str:
        return f"{self.caller.tenant}:{self.labels.user or self.labels.task_id or self.msg_id}"

    @property
    def routing_key(self) -> RoutingKey:
        policy, pin, _ = self.route
        return pin or self.key if policy is None else PolicyKey(policy.id, self.key, pin)

    @property
    def captured_by(self) -> str:
        return "engine" if self.writer.transcript.captured else "trainer"

    def engine_headers(self) -> Mapping[str, str]:
        # vLLM makes its reply's id from this header; the client's own would let it forge the ids of other replies.
        headers = {"X-Request-Id": self.msg_id.removeprefix(self.dialect.prefix), "Content-Type": "application/json"}
        if "logprobs" in self.added_fields:  # only the explorer reads them
            headers[wire.HEADER] = wire.PACKED
            if self.sampling.truncated:
                headers[wire.MASK_HEADER] = "1"
        if self.trace is not None:
            headers["traceparent"] = self.trace.engine.traceparent
        return headers

    def headers(self, version: int | None, kind: Headers) -> Headers:
        request_id = self.request_id.encode("latin-1", "replace")
        headers = [*kind, (b"x-request-id", request_id)]
        if version is not None:
            headers.append((b"x-tuneloop-version", b"%d" % version))
        if (policy := self.route.policy) is not None:
            headers.append((b"x-tuneloop-policy", policy.name.encode()))
        if self.dialect.path == MESSAGES:
            headers.append((b"request-id", request_id))
        if ignored := (*self.ignored_fields, *self.labels.ignored):
            headers.append((b"x-tuneloop-ignored", ", ".join(ignored).encode("latin-1", "replace")))
        if self.clamped_field:
            headers.append((b"x-tuneloop-clamped", self.clamped_field.encode()))
        return [*headers, *dialects.merged_header(self.merged_turns)]


class RequestParser:
    def __init__(
        self,
        settings: Settings,
        signer: ReplyIdSigner,
        system_turns: SystemTurns,
        find_context_length: Callable[[], Awaitable[int | None]],
        engines: fleet.Fleet,
    ) -> None:
        explorer = settings.explorer
        self._find_context_length = find_context_length if explorer.clamp_max_tokens else None
        self._system_turns = system_turns
        self._own_engines = not explorer.rollout_model.engine_urls
        self._any_reply, self._record_share = settings.algorithm.of_any_reply, settings.buffer.record_share
        self.capture = CaptureChoice(explorer.capture)
        self._signer, self._tenants = signer, settings.tenants
        self._pins, self._fleet = fleet.PinParser(settings), engines
        self._default_temperature = settings.model.temperature
        self._default_tokens, self._limit = settings.model.max_response_tokens, limit_of(settings)
        self._max_body_bytes, self._max_choices = explorer.max_body_bytes, explorer.max_choices
        rollout = explorer.rollout_model
        self._prefix_affinity = explorer.prefix_affinity and max(len(rollout.engine_urls), rollout.engine_num) > 1
        on_cpu = self._own_engines and not settings.cluster.gpu_per_node
        self._unsafe_fields = vllm.UNSAFE_ON_CPU if on_cpu else frozenset()
        # External engines may have other defaults, and then a reply would not be a sample of the policy as we assume.
        defaults = vllm.NEUTRAL_SAMPLING | {"temperature": settings.model.temperature}
        self._defaults = defaults if rollout.engine_urls else {}
        self._holds_tools = engine_flags.holds_tools(rollout.engine_args, rollout.tool_call_parser)

    async def parse(self, dialect: Dialect, raw: ClientRequest, started: float) -> Request:
        """Read and parse a request. Raises RequestRefused if it is not valid."""
        caller, tenant = raw.caller, self._tenants.get(raw.caller.tenant, _ANY_TENANT)
        raw_body = as_utf8(await raw.body(self._max_body_bytes))
        body = dialect.normalize(await parse_body(raw_body))
        _, pin, alias = route = await self._pins.route(body, caller, self._fleet)
        if pin or alias:
            body["model"] = self._pins.model_name
        stream, store = flag_of(body, "stream"), optional_bool(body, "store")
        flag_of(body, "return_token_ids")
        check_template(body)
        refuse_misplaced(body)
        upstream, merged_turns = await self._system_turns.merge(await dialect.to_upstream(body, caller))
        upstream, unreadable = dialects.with_readable_calls(upstream)
        upstream, clamped = await self._clamp(body, upstream)
        if any(word in raw_body for word in _MEDIA_WORDS):
            refuse_remote_files(upstream)
            upstream = with_own_uuids(upstream, caller.tenant)
        if (choices := dialect.count_choices(upstream)) > self._max_choices:
            reason = f"a request may ask for {self._max_choices} choices, and this one asks for {choices}"
            raise RequestRefused(reason, code="too_many_choices", param="n")
        if choice_count(upstream) > _MOST_OF_A_PROMPT:
            reason = f"a prompt may have {_MOST_OF_A_PROMPT} choices; ask several times for more"
            raise RequestRefused(reason, code="too_many_choices", param="n")
        labels = labels_of(upstream, raw.run, train=tenant.train)
        drop_reason = None if labels.train else "opt_out"
        consents = (said := raw.header(_TRAIN_HEADER)) is None or coerce_bool(said, _TRAIN_HEADER.decode())
        if not self._pins.aliases.get(alias or "", True) or not consents:
            drop_reason = "opt_out"  # whatever the run's URL says: this request is none of the run's
        elif labels.run_id and is_side_request(body, upstream, raw.header(b"user-agent") or ""):
            drop_reason = "side_request"
        asked, not_stored = store, "store_false" if store is False and tenant.store != "always" else ""
        if store is None or tenant.store == "always":
            # All calls of a run are recorded, or none.
            run = f"{caller.tenant}\0{labels.task_id}\0{labels.run_id}" if labels.run_id else str(random.random())
            store = bool(tenant.store) and fleet.in_share(b"recorded", run, self._record_share)
            not_stored = "" if store else "settings"
        sampling = sampling_of(upstream, default_temperature=self._default_temperature, holds_tools=self._holds_tools)
        sampling = sampling._replace(truncated=sampling.truncated and store and not self._any_reply)
        msg_id = self._signer.mint(caller.tenant, choices if store else 0, dialect.prefix)
        sent = orjson.dumps(body) if pin or alias else raw_body
        for_engine = self._for_engine(dialect, caller, msg_id, sent, body, upstream, truncated=sampling.truncated)
        shown = body | {"model": alias} if alias else body
        writer = dialect.writer(shown, msg_id, dialect.upstream_prefix + msg_id.removeprefix(dialect.prefix))
        if alias:
            writer.rename(self._pins.model_name, to=alias)
        writer.transcript.captured = for_engine.captured
        most = next((value for name in LENGTHS if (value := upstream.get(name)) is not None), None)
        writer.transcript.limit = self._limit.of(upstream, self._default_tokens if dialect.length_field else None)
        raw.meter.expect(body_bytes=len(raw_body), choices=choices, most=most)
        return Request(
            dialect=dialect,
            body=raw_body,
            upstream_body=for_engine.body,
            plain_body=for_engine.plain_body,
            added_fields=for_engine.added_fields,
            msg_id=msg_id,
            choices=choices,
            stream=stream,
            store=store,
            sampling=sampling._replace(drop_reason=drop_reason) if drop_reason else sampling,
            labels=labels,
            ignored_fields=(
                *for_engine.ignored_fields,
                *(name for name in _LEFT_OUT if body.get(name)),
                *dialect.left_out(body),
                *unreadable,
                *(("store",) if asked is False and store else ()),
            ),
            caller=caller,
            request_id=raw.header(b"x-request-id") or msg_id,
            received_at=steady_clock() - (waited_s := time.monotonic() - started),  # a client may send its body slowly
            stamp=stamp(ago_s=waited_s),
            started=started,
            writer=writer,
            meter=raw.meter,
            prefix_hashes=hash_prefixes(upstream) if self._prefix_affinity else (),
            route=route,
            model=str(body.get("model") or ""),
            traces=trace_keys(*labels.names, raw.header(b"x-request-id"), traceparent=raw.header(b"traceparent")),
            merged_turns=merged_turns,
            is_retry=raw.header(_RETRIES) not in (None, "0"),
            not_stored=not_stored,
            clamped_field=clamped,
        )

    async def _clamp(self, body: Mapping[str, Any], upstream: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The engine's body with no more tokens asked for than the context has; the client's field, if it had more."""
        if self._find_context_length is None or (most := await self._find_context_length()) is None:
            return upstream, ""
        lowered = {name: most for name in LENGTHS if isinstance(value := upstream.get(name), int) and value > most}
        return (upstream | lowered, next(name for name in LENGTHS if name in body)) if lowered else (upstream, "")

    def _for_engine(
        self,
        dialect: Dialect,
        caller: Caller,
        msg_id: str,
        sent: bytes,
        body: Mapping[str, Any],
        upstream: dict[str, Any],
        *,
        truncated: bool,
    ) -> "_ForEngine":
        unwanted = self._unsafe_fields if caller.sees_all else (*self._unsafe_fields, *_OPERATORS_FIELDS)
        ignored = tuple(name for name in unwanted if upstream.get(name) is not None)
        # The salt of a key's tenant, with the client's own, if it has one that the engine can take.
        salt, own = dict[str, object](), upstream.get(_SALT)
        if caller.name and isinstance(own, str | None) and own != "":
            salt = {_SALT: caller.tenant if own is None else f"{caller.tenant}:{own}"}
        # Engines of others may have no plug-in, and would return much for a reply that is marked all the same.
        captured = self.capture.asks(upstream, truncated=truncated and self._own_engines)
        added = self._added_fields(dialect, upstream, captured=captured) | salt
        encode = partial(_encode_upstream, sent, body, upstream, _EXPLORER_FIELDS.union(ignored))
        return _ForEngine(encode(added), partial(encode, {}), tuple(added), ignored, captured=captured)

    def _added_fields(self, dialect: Dialect, upstream: Mapping[str, Any], *, captured: bool) -> dict[str, object]:
        added = {name: value for name, value in self._defaults.items() if name not in upstream}
        for name, value in dialect.capture_fields(upstream).items():
            asked = upstream.get(name)
            # Whether the client asks for at least what we want.
            includes = asked == value if isinstance(value, bool) else asked is not None
            if not includes and (captured or name != "logprobs"):
                added[name] = value
        # Zero is a value too, which the engine refuses.
        has_most = upstream.get("max_tokens") is not None or upstream.get("max_completion_tokens") is not None
        # Not vLLM's own default, max_new_tokens: that one also caps what clients request.
        if self._default_tokens and dialect.length_field and not has_most:
            added[dialect.length_field] = self._default_tokens
        return added


class _ForEngine(NamedTuple):
    """The body for an engine, how to encode it without `added_fields`, and what of the client's is left out."""

    body: bytes
    plain_body: Callable[[], bytes]
    added_fields: tuple[str, ...]
    ignored_fields: tuple[str, ...]
    captured: bool


def _encode_upstream(
    raw_body: bytes,
    body: Mapping[str, Any],
    upstream: Mapping[str, Any],
    dropped: frozenset[str],
    added: dict[str, object],
) -> bytes:
    """The body for the engine: the client's own bytes with the added fields appended, unless fields must change."""
    if upstream is body and upstream and upstream.keys().isdisjoint(dropped) and upstream.keys().isdisjoint(added):
        return b"%b,%b" % (raw_body.rstrip()[:-1], orjson.dumps(added)[1:]) if added else raw_body
    return orjson.dumps({name: value for name, value in upstream.items() if name not in dropped} | added)


def labels_of(body: dict[str, Any], run: RunBinding | None = None, *, train: bool = True) -> Labels:
    """The labels of a body, and of the run of its path, which wins; else `train` holds. Raises RequestRefused."""
    labels, consent = _labels_in(body)
    if run is None:
        return labels._replace(train=train if consent is None else consent)
    either = [each for each in (consent, run.train) if each is not None]
    train = all(either) if either else train  # an opt-out always holds
    return labels._replace(task_id=run.task_id, run_id=run.run_id, train=train)


def refuse_misplaced(body: dict[str, Any]) -> None:
    """Raise RequestRefused for consent beside `metadata`: nothing would read it, and the reply would be trained on."""
    for name in _CONSENT:
        if name in body:
            raise RequestRefused(f"write metadata.{name} instead of {name}", code="unknown_parameter", param=name)


def _labels_in(body: dict[str, Any]) -> tuple[Labels, bool | None]:
    metadata = body.get("metadata")
    if metadata:
        try:
            size = len(orjson.dumps(metadata))
        except orjson.JSONEncodeError:  # nested too deeply, or a number that is too large
            raise RequestRefused("metadata cannot be stored as JSON", code="invalid_value", param="metadata") from None
        if size > MAX_METADATA_BYTES:
            message = f"metadata must have at most {MAX_METADATA_BYTES} bytes as JSON"
            raise RequestRefused(message, code="too_long", param="metadata")
    reader = _LabelReader(metadata if isinstance(metadata, dict) else {})
    priority, train = reader.read("priority", _priority), reader.consent()
    # Ours first: a client that sets it means it for us. OpenAI's newer name comes before its older one.
    identifier, user = body.get("safety_identifier"), reader.read("user", _person)
    if not user and identifier and isinstance(identifier, str):
        user = person_name(device_of(identifier))
    if not user:
        if not isinstance(older := body.get("user"), str | None):
            raise wrong_type("user", "a string")  # vLLM refuses it too
        user = person_name(device_of(older)) if older else None
    labels = Labels(
        task_id=reader.read("task_id", id_of),
        run_id=reader.read("run_id", id_of),
        user=user,
        priority=0.0 if priority is None else priority,
        train=train is not False,
        trace_id=reader.read("trace_id", id_of),
        ignored=tuple(reader.ignored),
    )
    return labels, train


class _LabelReader:
    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self.ignored: list[str] = []

    def consent(self) -> bool | None:
        """Whether to train on the reply; None if it is not said. Raises RequestRefused for any other value."""
        names = [name for name in self._metadata if name.strip().lower() in _CONSENT]
        said = [coerce_bool(self._metadata[name], f"metadata.{name}") for name in names]
        return all(said) if said else None

    def read(self, name: str, parse: Callable[[object, str], T]) -> T | None:
        """A label; None if there is none. Raises RequestRefused if it is invalid, and prefixed."""
        if (value := self._metadata.get(PREFIX + name)) is not None:
            return parse(value, f"metadata.{PREFIX}{name}")
        if (value := self._metadata.get(name)) is None:
            return None
        try:
            return parse(value, f"metadata.{name}")
        except RequestRefused:
            self.ignored.append(f"metadata.{name}")
            return None


def _priority(value: object, param: str) -> float:
    # OpenAI's own clients can send nothing but strings in metadata.
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise wrong_type(param, "a number") from None
    return finite_number(value, param, bound=MAX_PRIORITY)


def _person(value: object, param: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise wrong_type(param, "a string or an integer")
    return person_name(device_of(str(value)))


def sampling_of(request: Mapping[str, Any], *, default_temperature: float, holds_tools: bool = False) -> Sampling:
    """Read the sampling parameters. `holds_tools`: engines may hold calls to a grammar. Raises RequestRefused."""
    asked = request.get("temperature")  # a number may come as a string
    temperature = default_temperature if asked is None else coerce_float(asked, "temperature")
    if not 0 <= temperature < math.inf:
        raise RequestRefused("temperature must be a number from 0", code="invalid_value", param="temperature")
    temperature = max(temperature, _LOWEST) if temperature else 0.0
    others = _not_neutral(request, NEUTRAL) if temperature else ["temperature=0"]
    # Until it is reached it changes nothing, which the reply shows.
    budget = request.get(_BUDGET) if _BUDGET in others else None
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        others.remove(_BUDGET)
    else:
        budget = None
    changed = f"sampling:{others[0]}" if others else None
    held = None if changed else _why_held(request, holds_tools)
    beyond_ids = next((f"sampling:{name}" for name in _not_neutral(request, BEYOND_IDS)), None)
    messages = request.get("messages")
    if beyond_ids is None and isinstance(messages, list):
        contents = [each.get("content") for each in messages if isinstance(each, dict)]
        for part in (part for content in contents if isinstance(content, list) for part in content):
            if not (isinstance(part, str) or (isinstance(part, dict) and part.get("type") in _WORDS)):
                beyond_ids = "sampling:media"
    # Of a grammar, too, only what it allows is left.
    truncated = bool(others) and TRUNCATING.issuperset(others)
    return Sampling(
        temperature, changed or held, beyond_ids, by_grammar=held is not None, truncated=truncated, budget=budget
    )


def _why_held(request: Mapping[str, Any], holds_tools: bool) -> str | None:
    if request.get("structured_outputs") is not None:
        return "sampling:structured_outputs"
    if request.get("response_format") not in (None, {"type": "text"}):
        return "sampling:response_format"
    # vLLM holds tool calls to a grammar not only where one is required.
    choice, tools = request.get("tool_choice"), request.get("tools")
    if choice not in (None, "none", "auto"):
        return "sampling:tool_choice"
    if choice == "none" or not tools:
        return None
    parallel = request.get("parallel_tool_calls")
    if parallel is not None and not equals(parallel, True):
        return "sampling:parallel_tool_calls"
    if holds_tools:
        return "sampling:tools"
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        strict = function.get("strict") if isinstance(function, dict) else None
        if strict is not None and not equals(strict, False):
            return "sampling:tools"
    return None


def _not_neutral(request: Mapping[str, Any], parameters: Mapping[str, tuple[object, ...]]) -> list[str]:
    if parameters.keys().isdisjoint(request):
        return []
    return [
        name
        for name, neutral in parameters.items()
        if (value := request.get(name)) is not None and not any(equals(value, each) for each in neutral)
    ]
