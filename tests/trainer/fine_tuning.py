"""Files and jobs made up for tests of the trainer."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from tuneloop.shared.experience import JobState
from tuneloop.shared.finetuning.job_plan import plan_job
from tuneloop.shared.ledger.files import FILES, StoredFile
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import Job, JobDraft
from tuneloop.shared.settings.settings import Settings

LORA = {"rank": 4, "alpha": 8}


def conversation(number: int, *, turns: int = 1, answer: str | None = None) -> dict[str, Any]:
    """A line of `supervised`, with so many answers."""
    messages = [{"role": "system", "content": "Add."}]
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"{number}+{turn}?"},
            {"role": "assistant", "content": answer or f"{number + turn}."},
        ]
    return {"messages": messages}


def preference(number: int) -> dict[str, Any]:
    """A line of `dpo`."""
    return {
        "input": {"messages": [{"role": "user", "content": f"{number}+1?"}]},
        "preferred_output": [{"role": "assistant", "content": f"{number + 1}."}],
        "non_preferred_output": [{"role": "assistant", "content": "No idea!"}],
    }


def put_file(settings: Settings, ledger: Ledger, lines: list[Any], name: str = "file-1") -> str:
    """Keep a file as the API does; its id."""
    folder = settings.job_dir / FILES
    folder.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(each) + "\n" for each in lines).encode()
    (folder / name).write_bytes(data)
    ledger.files.add(
        StoredFile(
            id=name,
            tenant="t",
            purpose="fine-tune",
            filename=f"{name}.jsonl",
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            created_at=0.0,
            created_by="ops",
        )
    )
    return name


def create_job(settings: Settings, ledger: Ledger, lines: list[Any], *, method: str = "supervised", **but: Any) -> Job:
    """A job that is queued, over a file of these lines; `but`: its hyperparameters, or parent, seed and the like."""
    ledger.versions.ensure_base(settings.model.model_path.absolute())
    its = {name: but.pop(name) for name in ("parent", "seed", "validation", "name", "tenant") if name in but}
    asked = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 1} | but
    plan = plan_job(settings, method, asked, lines=len(lines), seed=its.get("seed", 3))
    name = its.get("name", "file-1")
    training = put_file(settings, ledger, lines, name)
    held_out = its.get("validation")
    job = ledger.jobs.create(
        JobDraft(
            tenant=its.get("tenant", "t"),
            model="base",
            parent=its.get("parent", 0),
            options=plan.options,
            method=method,
            hyperparameters=plan.hyperparameters,
            seed=its.get("seed", 3),
            training_file=training,
            validation_file=put_file(settings, ledger, held_out, f"{name}-held-out") if held_out else None,
            rows_in_all=plan.rows_in_all,
            total_steps=plan.total_steps,
            by="ops",
        )
    )
    return ledger.jobs.change(job.id, JobState.QUEUED, "Files validated")


def lines_of_rows(ledger: Ledger) -> list[tuple[str, int, int]]:
    """What each row of a file is: which line in which epoch (`line:job:epoch`), its choice, and its version."""
    rows = ledger.transactions.read(_ROWS)
    return [(row.msg_id.partition(":")[2], row.choice, row.trained_version) for row in rows]


def _rows() -> Any:
    from sqlalchemy import select

    from tuneloop.shared.ledger.storage.schema import experiences

    columns = (experiences.c[name] for name in ("msg_id", "choice", "trained_version"))
    return select(*columns).where(experiences.c.msg_id.like("file-%")).order_by(experiences.c.id)


_ROWS = _rows()


Make = Callable[..., Settings]
