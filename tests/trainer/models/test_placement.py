"""Which GPU the trainer takes."""

from typing import Any

import pytest
import torch

from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.models.model import device_of, gpu_of


def settings(rollout: dict[str, Any], **but: Any) -> Settings:
    rollout = {"gpu_memory_utilization": 0.4} | rollout
    return Settings.model_validate({"model": {"model_path": "m"}, "explorer": {"rollout_model": rollout}} | but)


@pytest.mark.parametrize(
    ("engines", "gpus_here", "chosen"),
    [
        ({"engine_num": 1}, 2, 1),
        ({"engine_num": 2, "tensor_parallel_size": 2}, 8, 4),
        ({"engine_num": 1}, 1, 0),
        ({"engine_num": 4}, 4, 3),
        ({"engine_num": 4}, 2, 1),
        ({"engine_urls": ["http://gpu-box:8000"]}, 2, 0),
    ],
)
def test_it_is_the_first_that_no_engine_takes_or_else_the_last(engines, gpus_here, chosen):
    assert gpu_of(settings(engines), gpus_here=gpus_here) == chosen


def test_it_is_what_torch_waits_for_and_measures_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device = device_of(settings({"engine_num": 1}, cluster={"gpu_per_node": 2}))
    assert [device] == chosen == [torch.device("cuda:1")]


def test_engines_of_a_service_elsewhere_are_not_in_the_way():
    assert gpu_of(settings({"engine_num": 2}, mode="train"), gpus_here=4) == 0
