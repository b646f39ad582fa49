"""A run in a process of its own."""

from tuneloop.runner.models.bound_model import CallDefaults, make_model
from tuneloop.runner.models.run import Run


def ask_five_times(run: Run) -> None:
    """Ask, and see that this process's calls are taken down, and no others."""
    model = make_model(run, CallDefaults(model_name="t"), client="openai")
    for _ in range(5):
        asked = [{"role": "user", "content": "3+4="}]
        model.chat.completions.create(model="t", messages=asked, max_tokens=12, user=f"run {run.run_id}")
    assert len(run.calls) == 5
