"""One attempt at a task, the URL that binds every call to it, and the calls that it made."""

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One request for a reply, and what came of it.

    `msg_id` is the reply's id, under which feedback names it. `status` is HTTP's, 0 where no answer came. The counts of
    tokens are None where the reply did not say them, as of a stream that was not asked to. `lost`: the service
    could not answer, or broke its reply off. `request` is the same for the same request.
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
        """Whether a reply came."""
        return 200 <= self.status < 300


@dataclass(slots=True)
class RunCalls:
    """The calls of a run by our own model objects in this process, as they ended. Any thread may add to it."""

    made: list[ModelCall] = field(default_factory=list)

    def add(self, call: ModelCall) -> None:
        """Take down a call."""
        self.made.append(call)  # atomic, as far as threads go

    def __iter__(self) -> Iterator[ModelCall]:
        return iter(list(self.made))

    def __len__(self) -> int:
        """How many were answered."""
        return sum(each.answered for each in self)

    def __bool__(self) -> bool:
        return len(self) > 0

    @property
    def msg_ids(self) -> list[str]:
        """The ids of the replies."""
        return [each.msg_id for each in self if each.answered and each.msg_id is not None]

    @property
    def model_versions(self) -> list[int]:
        """The versions that answered, each once, ascending."""
        return sorted({each.model_version for each in self if each.model_version is not None})

    @property
    def outage(self) -> str | None:
        """What the service failed to answer, in a sentence; None where it has answered the same request since."""
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
        """Tokens of all prompts, each as long as it was sent."""
        return sum(each.prompt_tokens or 0 for each in self)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all replies."""
        return sum(each.completion_tokens or 0 for each in self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCalls:
    """The replies that a run got, as its service stored them, whatever client asked for them.

    Calls that continue one another are one sequence in training: `tokens` are prompts and replies call by call,
    `merged_tokens` those of the sequences, and `breaks` say why there are several.
    """

    calls: int
    tokens: int
    completion_tokens: int
    sequences: int
    merged_tokens: int
    breaks: tuple[str, ...] = ()

    @classmethod
    def of(cls, counts: Mapping[str, Any]) -> Self:
        """As the service says it. Raises LookupError or ValueError if it says something else."""
        numbers = {each.name: int(counts[each.name]) for each in fields(cls) if each.name != "breaks"}
        return cls(**numbers, breaks=tuple(map(str, counts.get("breaks") or ())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An attempt `run_id` at the task `task_id`. `service` is the explorer's URL, without `/v1`.

    Calls of a run with `train=False`, an evaluation, are kept and never trained on. `calls` are those that models of
    ours made; a client that is only given `base_url` and `api_key` takes down none.
    """

    service: str
    task_id: str
    run_id: str
    train: bool = True
    api_key: str = "none"
    calls: RunCalls = field(default_factory=RunCalls, compare=False, repr=False)

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its `base_url`: requests below it belong to this run."""
        return f"{self.service.rstrip('/')}/run/{self.token}/v1"

    @property
    def token(self) -> str:
        """The labels of its requests, as the path carries them: URL-safe base64, without padding, of a JSON object."""
        labels = {"task_id": self.task_id, "run_id": self.run_id} | ({} if self.train else {"train": False})
        written = json.dumps(labels, separators=(",", ":"), ensure_ascii=False).encode()
        return base64.urlsafe_b64encode(written).rstrip(b"=").decode()
