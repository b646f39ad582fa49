"""The records: an exchange, its experiences, and feedback, as they travel from the explorer to the trainer."""

import functools
import hashlib
import json
import re
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


#: Larger rewards are refused by the API and by the trainer: their square is not safe in float32, and one of them would
#: spoil its whole batch.
MAX_REWARD = 1e6


#: Characters of a task_id, run_id, user, source or metric: an index of PostgreSQL's holds no more of two at once.
MAX_NAME = 256


def person_name(name: str) -> str:
    """A person's name as rows have it: one that is too long for them, or has a NUL, becomes its SHA-256."""
    if len(name) <= MAX_NAME and "\0" not in name:
        return name
    return f"sha256:{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}"


def person_behind(source: str) -> str:
    """The person behind a source, without the prefix of the client's key.

    >>> person_behind("key:web/ann"), person_behind("ann")
    ('ann', 'ann')
    """
    return source.partition("/")[2] if source.startswith(KEY_SOURCE) and "/" in source else source


def names_nobody(source: str) -> bool:
    """Whether it is the application's own word: feedback without a source, with a key or without.

    >>> names_nobody(""), names_nobody("key:web"), names_nobody("key:web/ann"), names_nobody("ann")
    (True, True, False, False)
    """
    return not source or (source.startswith(KEY_SOURCE) and "/" not in source)


#: What a rater is known by: a tenant and a source, which is empty for feedback that names none.
Rater = tuple[str, str]


def voice_of(source: str) -> str:
    """Who is behind a source: the key for all names that are used with it, else the name itself.

    >>> voice_of("key:web/ann"), voice_of("key:web"), voice_of("ann")
    ('key:web', 'key:web', 'ann')
    """
    return source.split("/", 1)[0] if source.startswith(KEY_SOURCE) else source


def voter_of(source: str) -> str:
    """The name of the one voter that several sources stand for.

    >>> voter_of("key:web/ann"), voter_of("ann")
    ('key:web/', 'ann')
    """
    return f"{voice_of(source)}/" if source.startswith(KEY_SOURCE) else source


def trace_keys(*names: object, traceparent: str | None = None) -> tuple[str, ...]:
    """What names of a trace are kept as: Langfuse's own id of a trace for a name. That of OpenTelemetry is its own key.

    >>> trace_keys("msg-1", None, traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    ('3a0de37932e8b19746f20b22414f862f', '0af7651916cd43dd8448eb211c80319c')
    """
    keys = [hashlib.sha256(each.encode()).hexdigest()[:32] for each in names if each and isinstance(each, str)]
    return tuple(dict.fromkeys([*keys, *(traceparent or "").lower().split("-")[1:2]]))


def rater_of(event: Any) -> Rater:
    return event.tenant, event.source or ""


@dataclass(frozen=True, slots=True)
class TrustedRaters:
    """Whose word alone decides a metric: some sources, the judge, and the application, which names no source."""

    named: frozenset[tuple[str, str]] = frozenset()
    judge: str | None = None

    def __contains__(self, rater: object) -> bool:
        if not isinstance(rater, tuple):
            return False
        return rater in self.named or names_nobody(rater[1]) or (self.judge is not None and rater[1] == self.judge)


#: What the sources of clients with keys begin with.
KEY_SOURCE = "key:"

#: Everybody's whose key names no other, and who has no key.
DEFAULT_TENANT = "default"

# No slash: it ends a tenant where the name of a key follows, and a key where that of a rater does.
_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


def is_tenant_name(text: str) -> bool:
    return _TENANT_NAME.fullmatch(text) is not None


#: Stands for a token id that spelled what was redacted: nothing is learnt from it, and its log-probability is 0.
REDACTED = -1


class State(StrEnum):
    """The state of an experience. The arrows are the only legal transitions."""

    RECORDED = "recorded"  # -> rewarded
    REWARDED = "rewarded"  # -> committed; -> recorded when its feedback is retracted
    COMMITTED = "committed"  # -> leased, expired; -> recorded as above
    LEASED = "leased"  # -> trained, dropped; -> committed when the lease ends
    TRAINED = "trained"  # final: contained in exactly one registered version
    EXPIRED = "expired"  # final: older than the staleness bound
    DROPPED = "dropped"  # final: not trainable, with the reason


class Kind(StrEnum):
    NUMBER = "number"
    BOOLEAN = "boolean"  # a thumb: value 1 is up, 0 is down
    LABEL = "label"
    COMMENT = "comment"
    DEMONSTRATION = "demonstration"  # the answer as it should have been
    PREFERENCE = "preference"  # this reply rather than another one
    RETRACTION = "retraction"  # takes back the same source's feedback under the same metric


class Outcome(StrEnum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # already recorded, so it is not stored a second time
    UNKNOWN = "unknown"  # about no reply of ours, so it is not stored
    LATE = "late"  # stored, but the reply has been trained on, has expired, or its attribution window has closed
    PENDING = "pending"  # on disk, to be applied when the reply's row, or the database, is there
    NOT_RECORDED = "not_recorded"  # about a reply that the request or the settings kept out: it is not stored
    FULL = "full"  # as much has been said of its reply or run as may be, so it is not stored


class VersionState(StrEnum):
    """The state of a version. The arrows are the only legal transitions."""

    CANDIDATE = "candidate"  # -> canary, champion, rejected, retired (a newer one came first)
    CANARY = "canary"  # -> champion, retired, rolled_back; answers a part of the traffic, or copies of it
    CHAMPION = "champion"  # -> retired, rolled_back
    REJECTED = "rejected"  # final: never served, with the reason
    ROLLED_BACK = "rolled_back"  # final: has served, and must not again, with the reason
    RETIRED = "retired"  # -> champion, when a newer one is rolled back, or as an administrator says; -> rejected


class PolicyState(StrEnum):
    ACTIVE = "active"  # -> paused, deleted
    PAUSED = "paused"  # -> active, deleted; it answers, and is not trained
    DELETED = "deleted"  # final: it answers no requests, its rows stay


class JobState(StrEnum):
    """The state of a fine-tuning job, in the words of OpenAI's API. The arrows are the only legal transitions."""

    VALIDATING = "validating_files"  # -> queued, failed, cancelled
    QUEUED = "queued"  # -> running, paused, failed, cancelled
    RUNNING = "running"  # -> succeeded, paused, failed, cancelled
    PAUSED = "paused"  # -> queued, cancelled
    SUCCEEDED = "succeeded"  # final
    FAILED = "failed"  # final, with an error
    CANCELLED = "cancelled"  # final


class RaterState(StrEnum):
    ACTIVE = "active"  # -> quarantined
    QUARANTINED = "quarantined"  # -> active


class VersionAction(StrEnum):
    PUBLISHED = "published"
    EVALUATED = "evaluated"
    CANARY = "canary"
    PROMOTED = "promoted"
    RETIRED = "retired"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"
    PINNED = "pinned"
    UNPINNED = "unpinned"
    MISMATCH = "mismatch"  # an engine that should have served it did not


class Evaluator(StrEnum):
    ENGINE = "engine"
    TRAINER = "trainer"


class AlarmState(StrEnum):
    RAISED = "raised"  # -> cleared
    CLEARED = "cleared"


class Scope(StrEnum):
    """Rights of a key in its own tenant; `admin` has all of them, and the operator's."""

    INFERENCE = "inference"
    FEEDBACK = "feedback"
    READ = "read"  # what is stored, and how the training goes
    COMMIT = "commit"  # what is trained on: release it, relabel and delete what is stored
    METRICS = "metrics"  # the service's figures, of all tenants together
    ADMIN = "admin"


class KeyAction(StrEnum):
    CREATED = "created"
    REVOKED = "revoked"


def since_boot() -> float:
    """Seconds since this machine was started, sleep included: the same for all its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Stamp(NamedTuple):
    """When something was said, whatever any clock says: `seconds` after this `boot` of a machine."""

    boot: str
    seconds: float


class SteadyClock:
    """Seconds since 1970 by `wall` when made, then by `ticks`, which no user sets; it follows the ledger's time."""

    def __init__(self, wall: Callable[[], float] = time.time, ticks: Callable[[], float] = since_boot) -> None:
        self._ticks = ticks
        self._offset = wall() - ticks()

    def __call__(self) -> float:
        return self._offset + self._ticks()

    def follow(self, now: float) -> None:
        self._offset = now - self._ticks()

    def time_at(self, ticks: float) -> float:
        """The time when the ticks were that many, even if this clock has learnt since what time it is."""
        return self._offset + ticks

    def time_of(self, stamp: Stamp) -> float | None:
        """When it was, by this clock; None if the machine was started since, or it was another machine."""
        return self.time_at(stamp.seconds) if stamp.boot and stamp.boot == boot() else None


#: The time of now, in seconds since 1970, for this process.
steady_clock = SteadyClock()


def stamp(*, ago_s: float = 0.0) -> Stamp:
    return Stamp(boot(), since_boot() - ago_s)


@functools.cache
def boot() -> str:
    """This start of the machine; empty where the system does not name it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar that constrained a reply, as the engine compiled it from the request.

    `spec` is a JSON schema, a regular expression or xgrammar's structural tag as JSON. `stop_ids` end the reply beside
    the model's own. `tokens` are those that `top_p`, `top_k` and `min_p` left. `sets` holds int32 bytes: the count of
    ids for each completion id, then all ids.
    """

    kind: Literal["json", "regex", "structural_tag", "tokens"]
    spec: str
    stop_ids: tuple[int, ...] = ()
    sets: bytes = b""


class Experience(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled choice of a reply.

    `prompt_ids` and `completion_ids` are little-endian int32 bytes, `logprobs` float32 bytes: natural log, one per
    completion id, under the sampled distribution; all NaN if the engine was not asked for them. With a `grammar` they
    are the policy's among the allowed tokens. Weights may change during a reply: `version_min` and `version_max` bound
    the versions that wrote it. `tool_calls` is the JSON list of the message. `drop_reason` excludes it from training.
    `unsampled`: `logprobs` are not those of a sample of the policy, so only methods without a probability ratio can
    train on it.
    """

    choice: int
    prompt_ids: bytes
    completion_ids: bytes
    logprobs: bytes
    version_min: int
    version_max: int
    temperature: float
    finish_reason: str | None
    text: str
    tool_calls: bytes | None = None
    drop_reason: str | None = None
    unsampled: str | None = None
    grammar: Grammar | None = None


#: How many tokens the client wants of a choice, by the names that engines take.
LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

#: What engines call the end of a reply that may have been cut off all the same.
_WHOLE = frozenset({"stop", "tool_calls", "function_call"})


class ReplyLimit(NamedTuple):
    """The most tokens of a reply, and of its prompt with it; None: unknown. `ends` are the tokens that end a reply."""

    ends: frozenset[int]
    context: int | None = None
    most: int | None = None

    def cuts(self, finish_reason: str | None, prompt: int, completion_ids: Sequence[int]) -> bool:
        """Whether these ids, behind a prompt of so many, fill the limit and do not end by themselves."""
        limits = [self.most] if self.most is not None else []
        limits += [self.context - prompt] if self.context is not None else []
        is_known = finish_reason in _WHOLE and self.ends and limits and completion_ids
        return bool(is_known) and completion_ids[-1] not in self.ends and len(completion_ids) >= min(limits)

    def of(self, upstream: Mapping[str, Any], default: int | None) -> "ReplyLimit":
        """That of one request, which asks for the `default` if it says nothing."""
        asked = next((value for name in LENGTHS if (value := upstream.get(name)) is not None), default)
        with suppress(TypeError, ValueError):  # the engine refuses it
            return self._replace(most=None if asked is None else int(asked))
        return self


class Exchange(msgspec.Struct, frozen=True, kw_only=True, tag="exchange"):
    """One request and its reply.

    `request` is the client's JSON body, `user` its person; times are seconds since 1970, UTC. `buffer.order` may prefer
    a higher `priority`. `engine` is the number of the engine among the `explorer`'s. A `stamp` dates the receipt;
    `received_at` counts only until the ledger's time is known. `key` is the client key's name, for its turn in the
    drain. `traces` are keys of other names: see `trace_keys`. `is_retry`: the client had no answer to an earlier
    request. `policy` is the id of the policy that answered.
    """

    msg_id: str
    tenant: str
    endpoint: str
    request: bytes
    received_at: float
    latency_s: float
    experiences: tuple[Experience, ...]
    task_id: str | None = None
    run_id: str | None = None
    user: str | None = None
    priority: float = 0.0
    engine: int | None = None
    stamp: Stamp | None = None
    key: str = ""
    explorer: str | None = None
    traces: tuple[str, ...] = ()
    is_retry: bool = False
    policy: int = 0


class Feedback(msgspec.Struct, frozen=True, kw_only=True, tag="feedback"):
    """One feedback event about one reply, or, where `msg_id` is None, about every reply of one `task_id` and `run_id`.

    `choice` None means every choice. `value` is the number or the thumb (1 up, 0 down); `text` the label, comment or
    edited answer. A preference names the rejected reply in `other_msg_id` and `other_choice`. With a `msg_id`,
    `task_id` and `run_id` are the reply's own if its request had none.
    Of two events with one `event_id` the first is stored; `call_id` names its request. `occurred_at` is by the client's
    clock. `stamp` orders events and dates the receipt, as that of an exchange.
    """

    event_id: str
    call_id: str
    tenant: str
    msg_id: str | None
    choice: int | None
    received_at: float
    kind: Kind = Kind.NUMBER
    metric: str = "reward"
    value: float | None = None
    text: str | None = None
    other_msg_id: str | None = None
    other_choice: int | None = None
    task_id: str | None = None
    run_id: str | None = None
    source: str | None = None
    occurred_at: float | None = None
    stamp: Stamp | None = None
    key: str = ""


Record = Exchange | Feedback

#: What a msg_id that is ours ends in: so many digits of base 32, of so many bytes.
SIGNED, SIGNED_BYTES = 40, 25


def minted_at(msg_id: str) -> float:
    """When a msg_id was minted, in seconds since 1970. Raises ValueError if it is not ours."""
    return (int(msg_id[-SIGNED:], 32) >> 8 * (SIGNED_BYTES - 6)) / 1000


def time_received(record: Record, clock: SteadyClock = steady_clock) -> float:
    by_stamp = clock.time_of(record.stamp) if record.stamp else None
    return record.received_at if by_stamp is None else by_stamp


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    return _encoder.encode(record)


def decode(data: bytes) -> Record:
    """The record of `encode`'s bytes. Raises msgspec.MsgspecError on anything else."""
    return _decoder.decode(data)


def is_captured(logprobs: Float32s) -> bool:
    """Whether an engine returned log-probabilities, or there are no tokens."""
    return not (len(logprobs) and bool(np.isnan(logprobs).all()))


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32 bytes. Raises OverflowError or TypeError for other values."""
    return _little_endian(array("i", ids))


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    return _little_endian(array("f", logprobs))


def _little_endian(numbers: "array[int] | array[float]") -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


class AllowedTokens(NamedTuple):
    """What was allowed at each position: `at` gives a row of `rows`, bits of ids or `listed` ids and -1; -1: all."""

    rows: Int32s
    at: Int32s
    listed: bool = False


def message_of(answer: str) -> dict[str, Any] | None:
    """The assistant's message that an edited answer is the JSON of, None for a text."""
    if not answer.startswith("{"):
        return None
    try:
        message = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and message.get("role") == "assistant" else None


class Sample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A leased experience for the trainer: `completion_ids` and `logprobs` have the same length, at least 1.

    `unsampled`: why `logprobs` are not those of a sample of the policy, else None. `demonstration` is the latest valid
    edited answer, as text or a JSON message; an edited and unrated reply has its similarity to it as `reward`. With a
    `grammar`, `logprobs` are the policy's among the `allowed` tokens, which the trainer rebuilds. `recomputed`: the
    trainer computed them with the weights that sampled.
    """

    id: int
    prompt_ids: Int32s
    completion_ids: Int32s
    logprobs: Float32s
    reward: float
    temperature: float
    version_min: int
    version_max: int
    tenant: str
    task_id: str | None
    run_id: str | None
    group_id: int | None
    rewarded_at: float
    committed_at: float
    msg_id: str = ""
    choice: int = 0
    finish_reason: str | None = None
    demonstration: str | None = None
    unsampled: str | None = None
    sampled_at: float = 0.0
    grammar: Grammar | None = None
    allowed: AllowedTokens | None = None
    recomputed: bool = False
