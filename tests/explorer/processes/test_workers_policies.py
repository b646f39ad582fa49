"""Policies behind two workers: both know who answers, at the same moment."""

import json
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer import adapters
from tests.explorer.finetuning.job_service import LINES, TrainerDouble
from tests.explorer.finetuning.test_reinforcement import ASKED, GRADER, prompt, training
from tests.explorer.processes.test_workers import Staff
from tests.explorer.running import HELLO, eventually
from tests.explorer.test_main import attached_to, job, service, write_settings
from tests.loop.harness.services import free_port
from tuneloop.shared.experience import JobState
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import JobDraft
from tuneloop.shared.settings.loader import load_settings

pytestmark = pytest.mark.xdist_group("workers")


def version(client: httpx.Client, name: str) -> int:
    reply = client.post(CHAT, json=HELLO | {"model": name})
    return int(reply.headers["x-tuneloop-version"]) if reply.status_code == 200 else -reply.status_code


def draft_of(http: httpx.Client, line: object, **but: Any) -> JobDraft:
    """A job of one step on a file of one line."""
    data, form = json.dumps(line).encode(), {"purpose": "fine-tune"}
    return JobDraft(
        tenant="default",
        model="t",
        parent=0,
        training_file=http.post("/v1/files", files={"file": ("a.jsonl", data)}, data=form).json()["id"],
        rows_in_all=1,
        total_steps=1,
        by="tests",
        **{"options": {}} | but,
    )


def test_what_answers_at_one_worker_answers_at_the_other(tmp_path: Path, double: EngineDouble) -> None:
    lora = {"rank": adapters.RANK, "resident": 1}
    look = {"explorer__workers": 2, "explorer__service_status_check_interval": 0.1}
    settings = write_settings(tmp_path, **look, model__lora=lora, **attached_to(double))
    base = adapters.write_base(tmp_path / "model")
    with service(settings) as (process, http), ExitStack() as stack:
        staff = Staff(tmp_path, process, http, double)
        clients, ledger = [*staff.clients_of_both(stack).values()], staff.ledger()
        stack.callback(ledger.close)
        assert [version(each, "one") for each in clients] == [-404, -404]
        policies = {name: ledger.policies.create(name, by="tests").id for name in ("one", "other")}
        assert all(version(each, name) > 0 for name in policies for each in clients), "each knows them at once"
        made = {}
        for name, number in policies.items():
            made[name] = adapters.register(ledger, job(tmp_path), base, policy=number)
            eventually(lambda seen=name: made[seen] in {version(each, seen) for each in clients})
            assert [version(each, name) for each in clients] == [made[name]] * 2
        # One adapter at a time: what a worker has loaded for itself, the other may ask.
        for client in (*clients, *reversed(clients)):
            assert [version(client, name) for name in policies] == [*made.values()]
            assert len(double.adapters) == 1
        ledger.policies.delete(policies["one"], by="tests")
        eventually(lambda: [version(each, "one") for each in clients] == [-404, -404])
        assert [version(each, "other") for each in clients] == [made["other"]] * 2
        asked = {"n_epochs": 1, "batch_size": 1, "learning_rate_multiplier": 1}
        draft = draft_of(http, LINES[0], method="supervised", hyperparameters=asked)
        for client in clients:
            trained = ledger.jobs.create(draft)
            eventually(lambda seen=trained.id: ledger.jobs.get(seen).state is JobState.QUEUED)
            (number,) = TrainerDouble(ledger, load_settings(settings)).train(trained.id)
            assert version(client, trained.name) == number, "each knows the model of a job at once"


def test_another_explorer_goes_on_with_the_job_of_one_that_dies(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    (tmp_path / "other").mkdir()
    same: dict[str, Any] = {"model__lora": {"rank": adapters.RANK}, "model__model_path": str(tmp_path / "model")}
    same |= {"explorer__workers": 2, "checkpoint_root_dir": str(tmp_path / "checkpoints")}
    files = []
    for place, double in zip((tmp_path, tmp_path / "other"), doubles[:2], strict=True):
        own = {"explorer__proxy_port": free_port(), "explorer__outbox_dir": f"{place}/outbox"}
        files.append(write_settings(place, **same, **attached_to(double), **own))
        double.says["models"] = "7"
    adapters.write_base(tmp_path / "model")

    def hang_after_four(request: dict[str, Any]) -> bool:
        doubles[0].hangs = len(doubles[0].chats) > 4
        return False

    doubles[0].quotes = hang_after_four
    with ExitStack() as stack:
        leading, http = stack.enter_context(service(files[0]))
        settings = load_settings(files[0])
        ledger = Ledger.of(settings)
        stack.callback(ledger.close)
        eventually(lambda: ledger.explorers.lead("nobody") is None)
        stack.enter_context(service(files[1]))
        asked = {"hyperparameters": ASKED | {"batch_size": 1, "compute_multiplier": 3.0}, "grader": GRADER}
        job = ledger.jobs.create(draft_of(http, prompt("3+4="), method="reinforcement", **asked))
        eventually(lambda: ledger.jobs.get(job.id).state is JobState.RUNNING)
        samples = ledger.policies.get(job.policy).settings["buffer.group_size"]
        task = f"{job.training_file}:1:{job.id}:0"
        eventually(lambda: len(ledger.files.samples("default", [task])) == 4 and doubles[0].hangs)
        leading.kill()
        with ledger.transactions.write() as connection:
            connection.exec_driver_sql("UPDATE explorers SET leads_until = 0")  # half a minute later
        with training(SimpleNamespace(ledger=ledger, settings=settings), job) as steps:
            eventually(lambda: ledger.jobs.get(job.id).finished_at is not None)
        assert ledger.jobs.get(job.id).state is JobState.SUCCEEDED
        rows = ledger.files.samples("default", [task])
        assert sorted(each for step in steps for each in step) == sorted(each.msg_id for each in rows)
        assert sorted(int(each.run_id) for each in rows) == [*range(samples)], "each sample once, and none is lost"
        assert len(doubles[1].chats) == samples - 4
