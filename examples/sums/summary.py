"""The demo's result: a verdict, a page for people, JSON for programs."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.sums.folder import MODEL_NAME, way_to_page
from tuneloop.shared.settings.database_url import without_password
from tuneloop.shared.settings.settings import Settings

GOAL, TOLERANCE = 0.7, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`reward_before` and `reward_after` are shares of right answers, whatever the agent rewarded."""

    seed: int
    reward: str
    reward_before: float
    reward_after: float
    versions: int
    steps: int
    trained: int
    requests: int
    requests_failed: int
    last_failure: str
    commits_put_off: int = 0
    feedback_to_served_s: float | None
    seconds: float
    curve: list[tuple[int, float, int]]

    @property
    def as_hoped(self) -> bool:
        """With a judge the reward must rise to 0.7; with random rewards it must not rise. No request may fail."""
        rose = self.reward_after - self.reward_before
        learnt = self.reward_after >= GOAL and rose > 0 if self.reward == "judge" else rose <= TOLERANCE
        return learnt and not self.requests_failed

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def page(self, settings: Settings, config: Path) -> str:
        """For people: the numbers, the files, and next steps."""
        lag = "-" if self.feedback_to_served_s is None else f"{self.feedback_to_served_s:.1f} s"
        question = json.dumps({"model": MODEL_NAME, "messages": [{"role": "user", "content": "3+4="}]})
        key = f"x-api-key: $(cat {config.with_name('key')})"
        url = f"http://127.0.0.1:{settings.explorer.proxy_port}"
        failed = f"{self.requests_failed}   last: {self.last_failure}" if self.requests_failed else "0"
        if self.commits_put_off:
            failed += f"\ncommits put off          {self.commits_put_off}"
        rewarded_by = "the judge" if self.reward == "judge" else "a coin"
        return f"""
reward before            {self.reward_before:.2f}   (right answers; feedback came from {rewarded_by})
reward after             {self.reward_after:.2f}
versions published       {self.versions}
experiences trained      {self.trained}
requests                 {self.requests}
requests failed          {failed}
feedback to served       {lag} (median)
time                     {self.seconds:.0f} s

checkpoints              {settings.job_dir}
TensorBoard              {settings.tensorboard_dir}
database                 {without_password(settings.database_url)}

Of the experiences, "trained" are in a version; "dropped" are unrated questions, which measured the reward.

Try next:
  .venv/bin/tensorboard --logdir {settings.tensorboard_dir}
  .venv/bin/tuneloop run --config {config}
  {way_to_page(url, config)}
  curl {url}/v1/chat/completions -H "{key}" -H 'content-type: application/json' \\
    -d '{question}'
"""
