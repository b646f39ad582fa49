"""Settings of the algorithm that do not fit together."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tuneloop.shared.settings.settings import Settings


def settings(tmp_path: Path, **algorithm: Any) -> Settings:
    model = {"model_path": tmp_path} | algorithm.pop("model", {})
    return Settings.model_validate({"mode": "train", "model": model, "algorithm": algorithm})


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        (
            {"off_policy": {"level": "sequence"}},
            "off_policy.level: nothing is bounded by it with proximal: sampled and",
        ),
        ({"off_policy": {"correction": "none", "high": 4.0}}, "off_policy.high: nothing is bounded by it"),
        ({"off_policy": {"low": 0.1}}, "off_policy.low: nothing is bounded by it"),
        ({"overlong": {"buffer": 8}}, "overlong.buffer: the punishment begins so many tokens before the limit"),
        (
            {"overlong": {"buffer": 8}, "model": {"max_response_tokens": 7}},
            "overlong.buffer: 8 is more than model.max_response_tokens, 7; lower it",
        ),
        ({"dpo": {"label_smoothing": 0.5}}, "dpo.label_smoothing: 0.5 of the preferences would be wrong"),
        ({"kto": {"desirable_weight": 0.0, "undesirable_weight": 0.0}}, "kto: desirable_weight and undesirable_weight"),
        ({"algorithm_type": "distill"}, "distill: needs one teacher"),
        (
            {
                "algorithm_type": "distill",
                "distill": {"teacher_path": "m", "teacher_url": "http://h", "teacher_model": "m"},
            },
            "distill: needs one teacher",
        ),
    ],
)
def test_a_contradiction_is_told(tmp_path: Path, algorithm: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        settings(tmp_path, **algorithm)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"off_policy": {"correction": "mask", "level": "sequence", "low": 0.1, "high": 4.0}},
        {"off_policy": {"proximal": "recomputed", "level": "geometric", "high": 4.0}},
        {"overlong": {"buffer": 8}, "model": {"max_response_tokens": 8}},
        {"dpo": {"label_smoothing": 0.49}},
        {"kto": {"desirable_weight": 0.0}},
    ],
)
def test_what_fits_is_taken_also_when_it_was_written_out_in_full(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    found = settings(tmp_path, **algorithm)
    assert Settings.model_validate(found.model_dump()) == found


def test_bounds_of_importance_weights_leave_fresh_replies_in(tmp_path: Path) -> None:
    for name, value in (("low", 1.0), ("high", 1.0)):
        with pytest.raises(ValidationError, match=name):
            settings(tmp_path, off_policy={"correction": "mask", name: value})
