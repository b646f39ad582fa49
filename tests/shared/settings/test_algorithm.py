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
        ({"overlong": {"buffer": 8}}, "overlong.buffer: the punishment begins so many tokens before the limit"),
        (
            {"overlong": {"buffer": 8}, "model": {"max_response_tokens": 7}},
            "overlong.buffer: 8 is more than model.max_response_tokens, 7; lower it",
        ),
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
