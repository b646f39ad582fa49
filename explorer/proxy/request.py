"""Understands requests for replies: what goes upstream, who tells the reply, and what is kept of the two."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import orjson

from tuneloop.explorer.capture.reply_id import TENANT, ReplyIdSigner
from tuneloop.explorer.capture.sampling import Sampling, sampling_of
from tuneloop.explorer.dialects.dialect import MESSAGES, Dialect, ReplyWriter
from tuneloop.explorer.engines import affinity, vllm
from tuneloop.explorer.engines.version_routing import PinParser, VersionPin, is_held_out
from tuneloop.explorer.http.bodies import flag, object_of
from tuneloop.explorer.http.server import Headers, RawRequest
from tuneloop.explorer.proxy.labels import Labels, labels_of
from tuneloop.shared.experience import HELD_OUT
from tuneloop.shared.settings.settings import Settings

#: Fields that are for us and mean nothing to an engine.
_OURS = frozenset({"store", "metadata"})


class Request(NamedTuple):
    """One request, understood. `started` is monotonic, `received_at` seconds since 1970.

    `added` names what we ask of the engine beside the client; `plain` makes the request without that.
    """

    dialect: Dialect
    request: bytes
    upstream: bytes
    plain: Callable[[], bytes]
    added: tuple[str, ...]
    msg_id: str
    choices: int
    stream: bool
    stored: bool
    sampling: Sampling
    labels: Labels
    ignored: tuple[str, ...]
    request_id: str
    received_at: float
    started: float
    teller: ReplyWriter
    beginnings: tuple[int, ...] = ()
    pin: VersionPin | None = None

    @property
    def key(self) -> str:
        """Whose request it is: who comes again with the same key meets the same version."""
        return _key(self.labels, self.msg_id)

    @property
    def wanted(self) -> str | VersionPin:
        """By what its engine is chosen."""
        return self.pin or self.key

    def headers(self, version: int, kind: tuple[bytes, bytes]) -> Headers:
        """What the reply says about itself."""
        headers = [
            kind,
            (b"x-request-id", self.request_id.encode("latin-1", "replace")),
            (b"x-tuneloop-version", b"%d" % version),
        ]
        if self.dialect.path == MESSAGES:
            headers.append((b"request-id", headers[1][1]))
        if self.ignored:
            headers.append((b"x-tuneloop-ignored", ", ".join(self.ignored).encode()))
        return headers


class RequestParser:
    """Understands requests under the settings."""

    def __init__(self, settings: Settings, signer: ReplyIdSigner) -> None:
        explorer = settings.explorer
        self._signer = signer
        self._pins = PinParser(settings)
        self._default_temperature = settings.model.temperature
        self._default_tokens = settings.model.max_response_tokens
        self._max_body_bytes = explorer.max_body_bytes
        self._timeout_s = explorer.request_timeout
        rollout = explorer.rollout_model
        self._sticks = explorer.prefix_affinity and max(len(rollout.engine_urls), rollout.engine_num) > 1
        on_cpu = not settings.cluster.gpu_per_node and not explorer.rollout_model.engine_urls
        self._held_out = settings.gate.replay.share
        self._unsafe = vllm.BREAKS_CPU_ENGINES if on_cpu else frozenset()
        # Engines of others may have defaults of their own, and then a reply would not be what we take it for.
        defaults = vllm.NEUTRAL | {"temperature": settings.model.temperature}
        self._defaults = defaults if explorer.rollout_model.engine_urls else {}

    async def understood(self, dialect: Dialect, visit: RawRequest, started: float) -> Request:
        """The call that a request is. Raises RequestRefused if it is none."""
        request = await visit.body(self._max_body_bytes, self._timeout_s)
        body = object_of(request)
        if pin := self._pins.of(body):
            body["model"] = self._pins.name
        for param in ("stream", "return_token_ids", "store"):
            flag(body, param)
        dialect = dialect.of(body)
        asked = await dialect.asked(body)
        labels = labels_of(asked)
        sampling = sampling_of(asked, default_temperature=self._default_temperature)
        if not labels.train:
            sampling = sampling._replace(drop_reason="opt_out")
        ignored = tuple(param for param in self._unsafe if asked.get(param) is not None)
        choices = dialect.choices(asked)
        msg_id = self._signer.mint(TENANT, choices, dialect.prefix)
        if self._held_out and sampling.drop_reason is None and is_held_out(_key(labels, msg_id), self._held_out):
            sampling = sampling._replace(drop_reason=HELD_OUT)
        name = msg_id.removeprefix(dialect.prefix)
        verbatim = self._verbatim(dialect, asked, msg_id, ignored)
        added = self._added(dialect, asked) if verbatim is None else {}
        upstream = partial(_upstream, orjson.dumps(body) if pin else request, body, asked, _OURS.union(ignored))
        return Request(
            dialect=dialect,
            request=request,
            upstream=verbatim or upstream(added),
            plain=partial(upstream, {}),
            added=tuple(added),
            msg_id=msg_id,
            choices=choices,
            stream=body.get("stream") is True,
            stored=body.get("store") is not False,
            sampling=sampling,
            labels=labels,
            ignored=ignored,
            request_id=visit.header(b"x-request-id") or msg_id,
            # Before its body was read, which may have taken the client long.
            received_at=time.time() - (time.monotonic() - started),
            started=started,
            teller=dialect.teller(body, msg_id, dialect.upstream_prefix + name),
            beginnings=affinity.beginnings(asked) if self._sticks else (),
            pin=pin,
        )

    def _verbatim(self, dialect: Dialect, asked: dict[str, Any], msg_id: str, ignored: tuple[str, ...]) -> bytes | None:
        said = dialect.verbatim(asked, msg_id)
        return None if said is None else orjson.dumps({name: said[name] for name in said if name not in ignored})

    def _added(self, dialect: Dialect, asked: Mapping[str, Any]) -> dict[str, object]:
        """What the engine is asked beside what the client asks."""
        more = {name: value for name, value in self._defaults.items() if name not in asked}
        more |= {name: value for name, value in dialect.capture(asked).items() if not _as_much(asked.get(name), value)}
        # Not vLLM's own default, max_new_tokens: that one also caps what clients ask for.
        if self._default_tokens and dialect.length and not _says_how_long(asked):
            more[dialect.length] = self._default_tokens
        return more


def _upstream(
    request: bytes,
    body: Mapping[str, Any],
    asked: Mapping[str, Any],
    dropped: frozenset[str],
    more: dict[str, object],
) -> bytes:
    """What the engine gets. The client's own bytes, longer by what we ask, unless they say something else of it."""
    if asked is body and asked and asked.keys().isdisjoint(dropped) and asked.keys().isdisjoint(more):
        return b"%b,%b" % (request.rstrip()[:-1], orjson.dumps(more)[1:]) if more else request
    return orjson.dumps({name: value for name, value in asked.items() if name not in dropped} | more)


def _key(labels: Labels, msg_id: str) -> str:
    return f"{TENANT}:{labels.user or labels.task_id or msg_id}"


def _says_how_long(asked: Mapping[str, Any]) -> bool:
    # Zero is an answer too, which the engine refuses.
    return asked.get("max_tokens") is not None or asked.get("max_completion_tokens") is not None


def _as_much(asked: Any, wanted: object) -> bool:
    """Whether the client asks at least what we want."""
    return asked == wanted if isinstance(wanted, bool) else asked is not None
