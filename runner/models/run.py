"""Defines a run of a task: its URL for clients, and its calls."""

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One request for a reply, and its outcome.

    `msg_id` names the reply in feedback. `status` is HTTP's, 0 without an answer. Token counts are None if the reply
    lacks them, as streams may. `lost`: the service could not answer, or broke the reply off. `request` is a hash of the
    request.
    """

    path: str
    status: int
    msg_id: str | None = None
    model_version: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    duration_s: float = 0.0
    lost: bool = False
    request: int = field(default=0, repr=False)
    sent_s: float = field(default=0.0, repr=False)

    @property
    def answered(self) -> bool:
        return 200 <= self.status < 300


@dataclass(slots=True)
class RunCalls:
    """The calls of a run by models of this process, in order of their end. Thread-safe."""

    made: list[ModelCall] = field(default_factory=list)

    def add(self, call: ModelCall) -> None:
        self.made.append(call)  # atomic across threads

    def __iter__(self) -> Iterator[ModelCall]:
        return iter(list(self.made))

    def __len__(self) -> int:
        return sum(each.answered for each in self)

    def __bool__(self) -> bool:
        return len(self) > 0

    @property
    def msg_ids(self) -> list[str]:
        return [each.msg_id for each in self if each.answered and each.msg_id is not None]

    @property
    def model_versions(self) -> list[int]:
        return sorted({each.model_version for each in self if each.model_version is not None})

    @property
    def outage(self) -> str | None:
        """A sentence about a call that the service failed to answer and that no later equal call repeated; or None."""
        made = list(self)
        well = [each for each in made if each.answered and not each.lost]
        for call in made:
            ended_s = call.sent_s + call.duration_s
            if call.lost and not any(each.request == call.request and each.sent_s >= ended_s for each in well):
                how = f"status {call.status}" if call.status else "no connection, or no answer in time"
                return f"{call.path.rpartition('/v1')[2]} got no whole reply: {how}"
        return None

    @property
    def prompt_tokens(self) -> int:
        return sum(each.prompt_tokens or 0 for each in self)

    @property
    def completion_tokens(self) -> int:
        return sum(each.completion_tokens or 0 for each in self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCalls:
    """A run's replies as the service stored them, from any client.

    Training merges calls that continue one another into one sequence: `tokens` counts prompts and replies per call,
    `merged_tokens` per sequence, and `breaks` say why there are several sequences.
    """

    calls: int
    tokens: int
    completion_tokens: int
    sequences: int
    merged_tokens: int
    breaks: tuple[str, ...] = ()

    @classmethod
    def of(cls, counts: Mapping[str, Any]) -> Self:
        """Raises LookupError or ValueError for another answer."""
        numbers = {each.name: int(counts[each.name]) for each in fields(cls) if each.name != "breaks"}
        return cls(**numbers, breaks=tuple(map(str, counts.get("breaks") or ())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Attempt `run_id` at task `task_id`. `service` is the explorer's URL, without `/v1`.

    Calls of a run with `train=False`, an evaluation, are stored but not trained on. `calls` has those of our models,
    not those of clients that only know `base_url` and `api_key`.
    """

    service: str
    task_id: str
    run_id: str
    train: bool = True
    api_key: str = "none"
    calls: RunCalls = field(default_factory=RunCalls, compare=False, repr=False)

    @property
    def base_url(self) -> str:
        """The `base_url` for OpenAI clients: requests below it belong to this run."""
        return f"{self.service.rstrip('/')}/run/{self.token}/v1"

    @property
    def token(self) -> str:
        """The run's labels in its URL: a JSON object in URL-safe base64 without padding."""
        labels = {"task_id": self.task_id, "run_id": self.run_id} | ({} if self.train else {"train": False})
        written = json.dumps(labels, separators=(",", ":"), ensure_ascii=False).encode()
        return base64.urlsafe_b64encode(written).rstrip(b"=").decode()
