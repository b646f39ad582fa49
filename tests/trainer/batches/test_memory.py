"""The trainer chooses how many tokens go through at once by its GPU's memory."""

import pytest
from structlog.testing import capture_logs

from tests.cli.setup.test_setup import model_folder
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.trainer.micro_batch import fit_to_memory

GB = 10**9
OPEN = {"micro_batch_tokens": None, "device": "auto"}


@pytest.fixture
def on_gpu(settings, tmp_path, monkeypatch):
    """Settings of a trainer of the 0.6B shape on a GPU, which is not here."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    model = {"model_path": model_folder(tmp_path / "m")}
    return lambda **but: settings(**{"model": model, "trainer": OPEN, "cluster": {"gpu_per_node": 1}} | but)


@pytest.mark.parametrize(("gb", "expected"), [(80, 32768), (48, 8192)])
def test_the_most_that_fits_is_chosen_and_told(on_gpu, gb, expected):
    with capture_logs() as logs:
        chosen = fit_to_memory(on_gpu(), free=gb * GB, total=gb * GB)
    assert chosen.trainer.tokens_at_once == expected
    assert [(log["event"], log["tokens"]) for log in logs] == [("micro_batch_chosen", expected)]


def test_a_gpu_that_is_taken_in_part_has_room_for_less(on_gpu):
    assert fit_to_memory(on_gpu(), free=48 * GB, total=141 * GB).trainer.tokens_at_once == 8192


def test_a_gpu_that_is_too_small_is_refused_with_what_to_do(on_gpu):
    with pytest.raises(
        EnvironmentRefused, match=r"fits into 24\.0 GB .*trainer\.workers.*optimizer\.bits: 8.*model\.lora\.rank"
    ):
        fit_to_memory(on_gpu(), free=24 * GB, total=24 * GB)


def test_a_model_that_cannot_be_reckoned_has_the_default(on_gpu, tmp_path):
    (tmp_path / "m" / "config.json").write_text("{}")
    with capture_logs() as logs:
        assert fit_to_memory(on_gpu(), free=24 * GB, total=24 * GB).trainer.tokens_at_once == 8192
    assert [log["event"] for log in logs] == ["memory_unknown"]
