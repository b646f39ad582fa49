"""The Python of docs/fine_tuning.md runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openai.types.fine_tuning import FineTuningJob

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.finetuning.job_service import TrainerDouble, job_service, put, settings_of_jobs
from tests.explorer.running import eventually
from tests.house.documents.page_files import ROOT, blocks_of


def test_its_python_runs(tmp_path: Path, double: EngineDouble) -> None:
    [block] = [each.text for each in blocks_of(ROOT / "docs/fine_tuning.md") if each.language == "python"]
    with job_service(settings_of_jobs(tmp_path, double)) as explorer:
        jobs = explorer.openai().fine_tuning.jobs

        def finished(job_id: str) -> FineTuningJob:
            eventually(lambda: jobs.retrieve(job_id).status == "queued")
            TrainerDouble(explorer.ledger, explorer.settings).train(job_id)
            return jobs.retrieve(job_id)

        here = {
            "http://localhost:8010": explorer.url,
            '"tiny"': f'"{MODEL}"',
            'client.files.create(file=open("data.jsonl", "rb"), purpose="fine-tune")': "stored",
            "client.fine_tuning.jobs.retrieve(": "finished(",
        }
        for theirs, ours in here.items():
            assert theirs in block
            block = block.replace(theirs, ours)
        names: dict[str, Any] = {"stored": SimpleNamespace(id=put(explorer)), "finished": finished}
        exec(block, names)  # noqa: S102 - our own page
        assert names["job"].fine_tuned_model.startswith(f"ft:{MODEL}:sums:")
        assert double.chats[-1].weights is not None
