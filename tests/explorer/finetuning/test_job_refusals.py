"""What cannot be a fine-tuning job is refused in OpenAI's envelope, and leaves nothing behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer import adapters
from tests.explorer.finetuning.job_service import job_service, put
from tests.explorer.running import RunningExplorer
from tuneloop.shared.ledger.files import FILES
from tuneloop.shared.operations import job_requests

pytestmark = pytest.mark.contract

PATH = "/v1/fine_tuning/jobs"
GRADER = {"type": "string_check", "name": "g", "operation": "eq", "input": "{{item.a}}", "reference": "b"}


@pytest.fixture
def explorer(tmp_path: Path, double: EngineDouble) -> Iterator[RunningExplorer]:
    with job_service(adapters.adapted(tmp_path, double)) as running:
        yield running


def create(explorer: RunningExplorer, **but: Any) -> httpx.Response:
    fields = {"model": MODEL, "training_file": put(explorer)} | but
    return explorer.http.post(PATH, json={name: value for name, value in fields.items() if value != "leave out"})


def refusal(reply: httpx.Response) -> tuple[int, str, str]:
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return reply.status_code, error["code"], error["param"]


def method(kind: Any, grader: Any = None, **hyperparameters: Any) -> dict[str, Any]:
    config = {"hyperparameters": hyperparameters} | ({} if grader is None else {"grader": grader})
    return {"method": {"type": kind, kind if isinstance(kind, str) else "x": config}}


SFT, DPO, RFT = "method.supervised.hyperparameters", "method.dpo.hyperparameters", "method.reinforcement"

REFUSED: list[tuple[dict[str, Any], tuple[int, str, str]]] = [
    ({"model": "leave out"}, (400, "missing_required_parameter", "model")),
    ({"training_file": "leave out"}, (400, "missing_required_parameter", "training_file")),
    ({"model": 7}, (400, "invalid_type", "model")),
    ({"model": "gpt-5"}, (400, "model_not_found", "model")),
    ({"training_file": "file-none"}, (404, "file_not_found", "training_file")),
    ({"training_file": "../../etc/passwd"}, (404, "file_not_found", "training_file")),
    ({"training_file": ["a"]}, (400, "invalid_type", "training_file")),
    ({"validation_file": "file-none"}, (404, "file_not_found", "validation_file")),
    ({"suffix": "s" * 65}, (400, "invalid_value", "suffix")),
    ({"suffix": "a\nb"}, (400, "invalid_value", "suffix")),
    ({"seed": -1}, (400, "invalid_value", "seed")),
    ({"seed": 2**31}, (400, "invalid_value", "seed")),
    ({"seed": True}, (400, "invalid_type", "seed")),
    ({"metadata": {str(n): "" for n in range(17)}}, (400, "too_many", "metadata")),
    ({"metadata": {"a": 1}}, (400, "invalid_type", "metadata.a")),
    ({"integrations": [{"type": "wandb"}]}, (400, "unsupported_parameter", "integrations")),
    ({"epochs": 3}, (400, "unknown_parameter", "epochs")),
    ({"method": "dpo"}, (400, "invalid_type", "method")),
    (method("kto"), (400, "invalid_value", "method.type")),
    (method(["dpo"]), (400, "invalid_value", "method.type")),
    ({"hyperparameters": {"beta": 0.1}}, (400, "invalid_value", f"{SFT}.beta")),
    ({"hyperparameters": {"n_epochs": 0}}, (400, "invalid_value", f"{SFT}.n_epochs")),
    ({"hyperparameters": [1]}, (400, "invalid_type", "hyperparameters")),
    (method("dpo", beta="high"), (400, "invalid_value", f"{DPO}.beta")),
    (method("reinforcement"), (400, "invalid_value", f"{RFT}.grader")),
    (method("reinforcement", {"type": "python"}), (400, "invalid_value", f"{RFT}.grader.type")),
    (method("reinforcement", {"type": ["multi"]}), (400, "invalid_value", f"{RFT}.grader.type")),
]


@pytest.mark.parametrize(("but", "expected"), REFUSED, ids=[str(each[0])[:50] for each in REFUSED])
def test_what_cannot_be_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
    shared: RunningExplorer,
    but: dict[str, Any],
    expected: tuple[int, str, str],
) -> None:
    assert refusal(create(shared, **but)) == expected
    assert [each.name for each in shared.ledger.policies.all()] == ["default"]
    assert shared.http.get(PATH).json()["data"] == []


@pytest.fixture(scope="module")
def shared(places: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningExplorer]:
    """One explorer for all that is refused."""
    settings = adapters.adapted(tmp_path_factory.mktemp("refusals"), places[1].fresh())
    with job_service(settings) as running:
        yield running


def test_files_of_another_purpose_or_tenant_or_without_bytes_are_refused(explorer: RunningExplorer) -> None:
    of_another = create(explorer, training_file=put(explorer, tenant="umbra"))
    assert refusal(of_another) == (404, "file_not_found", "training_file")
    wrong = create(explorer, training_file=put(explorer, purpose="batch"))
    assert refusal(wrong) == (400, "invalid_file_purpose", "training_file")
    deleted = put(explorer)
    explorer.ledger.files.delete(deleted)
    assert refusal(create(explorer, training_file=deleted)) == (404, "file_not_found", "training_file")
    gone = put(explorer)
    (explorer.settings.job_dir / FILES / gone).unlink()
    assert refusal(create(explorer, training_file=gone)) == (503, "file_unreadable", "training_file")
    assert str(explorer.settings.job_dir) not in create(explorer, training_file=gone).text


def test_where_all_weights_are_trained_a_job_is_refused_with_the_reason(tmp_path: Path, double: EngineDouble) -> None:
    with job_service(adapters.adapted(tmp_path, double, rank=0)) as explorer:
        reply = create(explorer)
        assert refusal(reply) == (400, "model_not_trainable", "model")
        assert "all weights are trained" in reply.json()["error"]["message"]


def test_two_jobs_may_have_one_suffix(explorer: RunningExplorer) -> None:
    first, second = (create(explorer, suffix="same").json() for _ in range(2))
    assert first["id"] != second["id"]
    assert first["user_provided_suffix"] == second["user_provided_suffix"] == "same"


def test_a_tenant_has_a_bounded_number_of_open_jobs(explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_requests, "MOST_OPEN", 2)
    jobs = [create(explorer).json()["id"] for _ in range(2)]
    assert refusal(create(explorer)) == (429, "too_many_jobs", None)
    explorer.http.post(f"{PATH}/{jobs[0]}/cancel")
    assert create(explorer).status_code == 200


def test_the_older_hyperparameters_and_every_method_are_taken(explorer: RunningExplorer) -> None:
    older = create(explorer, hyperparameters={"n_epochs": 3, "batch_size": "auto"}).json()
    assert older["hyperparameters"]["n_epochs"] == older["method"]["supervised"]["hyperparameters"]["n_epochs"] == 3
    dpo = create(explorer, **method("dpo", beta=0.2)).json()
    assert (dpo["method"]["type"], dpo["method"]["dpo"]["hyperparameters"]["beta"]) == ("dpo", 0.2)
    graded = create(explorer, **method("reinforcement", GRADER, eval_interval=2, reasoning_effort="low")).json()
    assert graded["method"]["reinforcement"]["grader"] == GRADER
    null = create(explorer, suffix=None, seed=None, validation_file=None, method=None, integrations=None, metadata=None)
    assert null.status_code == 200


@pytest.mark.parametrize("piece", [1 << 20, 2])
def test_lines_are_counted_without_blank_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(job_requests, "_PIECE_BYTES", piece)
    cases = {b"": 0, b"\n \n": 0, b"a": 1, b"a\n": 1, b"a\n\n b\n": 2, b"a\r\nb\r\n": 2}
    for data, count in cases.items():
        (tmp_path / "lines").write_bytes(data)
        assert job_requests.count_lines(tmp_path / "lines") == count, data
