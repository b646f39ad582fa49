"""Parses requests for replies: what goes upstream, who writes the reply, and what is recorded of the two."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import orjson

from tuneloop.explorer.bulk_work import BodyParser
from tuneloop.explorer.capture.reply_id import ReplyIdSigner
from tuneloop.explorer.capture.sampling import Sampling, sampling_of
from tuneloop.explorer.dialects.dialect import MESSAGES, Dialect, ReplyWriter
from tuneloop.explorer.engines import fleet, vllm
from tuneloop.explorer.engines.fleet import PinParser, VersionPin
from tuneloop.explorer.engines.packing import wire
from tuneloop.explorer.http.bodies import as_utf8, optional_bool
from tuneloop.explorer.http.caller import Caller
from tuneloop.explorer.http.chat_template import check_template
from tuneloop.explorer.http.coercion import flag_of
from tuneloop.explorer.http.raw_request import Headers, RawRequest
from tuneloop.explorer.proxy.capture_choice import CaptureChoice
from tuneloop.explorer.proxy.labels import Labels, labels_of, refuse_misplaced
from tuneloop.explorer.proxy.media import with_own_uuids
from tuneloop.explorer.proxy.media_fetching import MediaFetcher
from tuneloop.explorer.proxy.system_turns import SystemTurns, merged_header
from tuneloop.explorer.proxy.token_charge import TokenCharge
from tuneloop.shared import engine_flags, steady_time
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.settings.feedback import TenantSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.spans import RequestTrace

#: Fields for the explorer, which an engine does not get.
_ANY_TENANT = TenantSettings()

_EXPLORER_FIELDS = frozenset({"store", "metadata"})

#: Fields that say what an engine does beside this request: they are the operator's. `vllm_xargs` may hold any of them.
_OPERATORS_FIELDS = ("kv_transfer_params", "ec_transfer_params", "request_id", "session_id", "priority", "vllm_xargs")

#: Replies may come from a cache only to those of one salt, so that no tenant learns by its clock what another has sent.
_SALT = "cache_salt"

#: Without one of these no request names a file, nor goes on with a conversation that does. JSON may write any letter of
#: them as an escape.
_MEDIA_WORDS = (b"_url", b'"image', b'"video', b'"audio', b'"source"', b'"uuid"', b"previous_response_id", b"\\u")


class Request(NamedTuple):
    """A parsed request. `started` is monotonic, `received_at` seconds since 1970.

    `added_fields` names what the engine gets beside the client's fields; `plain_body` encodes the request without them.
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
    stamp: steady_time.Stamp
    started: float
    writer: ReplyWriter
    charge: TokenCharge
    prefix_hashes: tuple[int, ...] = ()
    pin: VersionPin | None = None
    model: str = ""
    trace: RequestTrace | None = None
    merged_turns: int = 0

    @property
    def key(self) -> str:
        """The user, task or reply that decides the version: the same key gets the same version."""
        return _user_key(self.caller.tenant, self.labels, self.msg_id)

    @property
    def routing_key(self) -> str | VersionPin:
        """What its engine is chosen by."""
        return self.pin or self.key

    @property
    def captured_by(self) -> str:
        """Who makes the log-probabilities of its reply."""
        return "engine" if self.writer.transcript.captured else "trainer"

    def engine_headers(self) -> Mapping[str, str]:
        """The headers that an engine gets."""
        # vLLM makes its reply's id from this header; the client's own would let it forge the ids of other replies.
        name = self.msg_id.removeprefix(self.dialect.prefix)
        headers = {"X-Request-Id": name, "Content-Type": "application/json"}
        if "logprobs" in self.added_fields:  # nobody but us reads them
            headers[wire.HEADER] = wire.PACKED
        if self.trace is not None:
            headers["traceparent"] = self.trace.engine.traceparent
        return headers

    def headers(self, version: int, kind: tuple[bytes, bytes]) -> Headers:
        """The headers of the response to the client."""
        headers = [
            kind,
            (b"x-request-id", self.request_id.encode("latin-1", "replace")),
            (b"x-tuneloop-version", b"%d" % version),
        ]
        if self.dialect.path == MESSAGES:
            headers.append((b"request-id", headers[1][1]))
        if ignored := (*self.ignored_fields, *self.labels.ignored):
            headers.append((b"x-tuneloop-ignored", ", ".join(ignored).encode()))
        return [*headers, *merged_header(self.merged_turns)]


class RequestParser:
    """Parses requests under the settings."""

    def __init__(
        self, settings: Settings, signer: ReplyIdSigner, bodies: BodyParser, system_turns: SystemTurns
    ) -> None:
        explorer = settings.explorer
        self._bodies, self._system_turns = bodies, system_turns
        self.capture = CaptureChoice(explorer.capture)
        self._signer, self._tenants = signer, settings.tenants
        self._pins = PinParser(settings)
        self._default_temperature = settings.model.temperature
        self._default_tokens = settings.model.max_response_tokens
        self._max_body_bytes, self._max_choices = explorer.max_body_bytes, explorer.max_choices
        self._timeout_s = min(explorer.body_timeout, explorer.request_timeout)
        rollout = explorer.rollout_model
        self._prefix_affinity = explorer.prefix_affinity and max(len(rollout.engine_urls), rollout.engine_num) > 1
        on_cpu = not settings.cluster.gpu_per_node and not explorer.rollout_model.engine_urls
        self._unsafe_fields = vllm.UNSAFE_ON_CPU if on_cpu else frozenset()
        # External engines may have other defaults, and then a reply would not be a sample of the policy as we assume.
        defaults = vllm.NEUTRAL_SAMPLING | {"temperature": settings.model.temperature}
        self._defaults = defaults if rollout.engine_urls else {}
        self._media = MediaFetcher(frozenset(explorer.allowed_media_domains), max_bytes=explorer.max_body_bytes)
        self._holds_tools = engine_flags.holds_tools(rollout.engine_args, rollout.tool_call_parser)

    async def parse(self, dialect: Dialect, raw: RawRequest, started: float) -> Request:
        """Read and parse a request. Raises RequestRefused if it is not valid."""
        raw_body = as_utf8(await raw.body(self._max_body_bytes, self._timeout_s))
        body = dialect.normalize(await self._bodies.parse(raw_body, raw.caller.identity))
        if pin := self._pins.parse(body):
            body["model"] = self._pins.model_name
        stream, store = flag_of(body, "stream"), optional_bool(body, "store")
        flag_of(body, "return_token_ids")
        check_template(body)
        refuse_misplaced(body)
        dialect = dialect.for_body(body)
        upstream, merged_turns = await self._system_turns.merge(await dialect.to_upstream(body, raw.caller))
        if any(word in raw_body for word in _MEDIA_WORDS):
            upstream = with_own_uuids(await self._media.inline(upstream, raw.hold), raw.caller.tenant)
        labels = labels_of(upstream, raw.run(), train=self._tenant(raw.caller).train)
        sampling = self._sampling_of(upstream, labels)
        unwanted = (*self._unsafe_fields, *_operators_fields(raw.caller))
        ignored_fields = tuple(param for param in unwanted if upstream.get(param) is not None)
        salt = _salt_of(raw.caller, upstream)
        choices = self._count_choices(dialect, upstream)
        msg_id = self._signer.mint(raw.caller.tenant, choices, dialect.prefix)
        verbatim = _verbatim(dialect, upstream, msg_id, (ignored_fields, salt))
        captured = verbatim is not None or self.capture.asks(msg_id, upstream)
        added_fields = self._added_fields(dialect, upstream, captured=captured) | salt if verbatim is None else {}
        sent = orjson.dumps(body) if pin else raw_body
        encode = partial(_encode_upstream, sent, body, upstream, _EXPLORER_FIELDS.union(ignored_fields))
        writer = dialect.writer(body, msg_id, dialect.upstream_prefix + msg_id.removeprefix(dialect.prefix))
        writer.transcript.captured = captured
        return Request(
            dialect=dialect,
            body=raw_body,
            upstream_body=verbatim or encode(added_fields),
            plain_body=partial(encode, {}),
            added_fields=tuple(added_fields),
            msg_id=msg_id,
            choices=choices,
            stream=stream,
            store=self._is_stored(raw.caller, upstream, store),
            sampling=sampling,
            labels=labels,
            ignored_fields=ignored_fields,
            caller=raw.caller,
            request_id=raw.header(b"x-request-id") or msg_id,
            # The time before its body was read, which may have taken the client long.
            received_at=steady_time.now() - (waited_s := time.monotonic() - started),
            stamp=steady_time.stamp(ago_s=waited_s),
            started=started,
            writer=writer,
            charge=TokenCharge.of(raw.caller.meter, upstream, body_bytes=len(raw_body), choices=choices),
            prefix_hashes=fleet.hash_prefixes(upstream) if self._prefix_affinity else (),
            pin=pin,
            model=str(body.get("model") or ""),
            merged_turns=merged_turns,
        )

    def _sampling_of(self, upstream: dict[str, Any], labels: Labels) -> Sampling:
        found = sampling_of(upstream, default_temperature=self._default_temperature, holds_tools=self._holds_tools)
        return found if labels.train else found._replace(drop_reason="opt_out")

    def _is_stored(self, caller: Caller, upstream: Mapping[str, Any], wanted: bool | None) -> bool:
        store = self._tenant(caller).store if wanted is None else wanted
        if upstream.get("background") is True and not store:
            raise RequestRefused("a response in the background is stored", code="invalid_value", param="background")
        return store

    def _count_choices(self, dialect: Dialect, upstream: dict[str, Any]) -> int:
        if (choices := dialect.count_choices(upstream)) <= self._max_choices:
            return choices
        reason = f"a request may ask for {self._max_choices} choices, and this one asks for {choices}"
        raise RequestRefused(reason, code="too_many_choices", param="n")

    def _tenant(self, caller: Caller) -> TenantSettings:
        return self._tenants.get(caller.tenant, _ANY_TENANT)

    def _added_fields(self, dialect: Dialect, upstream: Mapping[str, Any], *, captured: bool) -> dict[str, object]:
        """The fields that the engine gets beside the client's: its log-probabilities are `captured` or not."""
        added = {name: value for name, value in self._defaults.items() if name not in upstream}
        added |= {
            name: value
            for name, value in dialect.capture_fields(upstream).items()
            if not _includes(upstream.get(name), value) and (captured or name != "logprobs")
        }
        # Not vLLM's own default, max_new_tokens: that one also caps what clients request.
        if self._default_tokens and dialect.length_field and not _has_max_tokens(upstream):
            added[dialect.length_field] = self._default_tokens
        return added


def _verbatim(
    dialect: Dialect, upstream: dict[str, Any], msg_id: str, but: tuple[tuple[str, ...], dict[str, object]]
) -> bytes | None:
    """The exact body for the engine, if there is one, without the first of `but` and with the second."""
    ignored, more = but
    if ignored or more:
        upstream = {name: value for name, value in upstream.items() if name not in ignored} | more
    fields = dialect.verbatim(upstream, msg_id)
    return None if fields is None else orjson.dumps(fields)


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


def _operators_fields(caller: Caller) -> tuple[str, ...]:
    return () if caller.sees_all else _OPERATORS_FIELDS


def _salt_of(caller: Caller, upstream: Mapping[str, Any]) -> dict[str, object]:
    """The salt of a key's tenant, with the client's own, if it has one that the engine can take."""
    own = upstream.get(_SALT)
    if not caller.name or not isinstance(own, str | None) or own == "":
        return {}
    return {_SALT: caller.tenant if own is None else f"{caller.tenant}:{own}"}


def _user_key(tenant: str, labels: Labels, msg_id: str) -> str:
    return f"{tenant}:{labels.user or labels.task_id or msg_id}"


def _has_max_tokens(upstream: Mapping[str, Any]) -> bool:
    # Zero is a value too, which the engine refuses.
    return upstream.get("max_tokens") is not None or upstream.get("max_completion_tokens") is not None


def _includes(requested: Any, wanted: object) -> bool:
    """Whether the client requests at least what we want."""
    return requested == wanted if isinstance(wanted, bool) else requested is not None
