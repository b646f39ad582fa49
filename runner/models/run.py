"""One attempt at a task, and the URL that binds every call to it, whatever client makes the call."""

import base64
import json
from dataclasses import dataclass, field

from tuneloop.runner.models.run_calls import RunCalls


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
