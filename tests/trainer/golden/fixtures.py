"""The fixtures as tensors: `for case in cases("dpo"): case.inputs["logprobs"]`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: How far apart those may be that compute a part in float32 whatever they are given (TRL: n / (n - 1)).
SINGLE_PRECISION = {
    "ppo_actor_loss_fn": 1e-6,
    "StepWiseGRPOAdvantageFn.process": 1e-6,
    "GRPOTrainer._generate_and_score_completions": 1e-7,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """What a function of another package made of `inputs`, which have the file's and the case's own ones."""

    package: str
    function: str
    settings: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.package}:{self.function}:{','.join(str(value) for value in self.settings.values())}"

    def agrees(self, ours: Tensor, name: str = "loss") -> None:
        """Asserts that the output `name` is ours, within 1e-8, or where one is partly in float32 a bit more."""
        apart = SINGLE_PRECISION.get(self.function, 1e-8 if ours.dtype == torch.float64 else 1e-6)
        theirs = torch.as_tensor(self.outputs[name], dtype=torch.float64)
        torch.testing.assert_close(ours.detach().double(), theirs, rtol=0, atol=apart)


def cases(name: str) -> list[Golden]:
    """All the cases of a file."""
    file = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    return [
        Golden(
            package=case["package"],
            function=case["function"],
            settings=case["settings"],
            inputs={key: _tensor(value) for key, value in (file["inputs"] | case.get("inputs", {})).items()},
            outputs={key: _tensor(value) if key != "rows" else value for key, value in case["outputs"].items()},
        )
        for case in file["cases"]
    ]


def _tensor(value: Any) -> Tensor:
    tensor = torch.tensor(value)
    return torch.tensor(value, dtype=torch.float64) if tensor.is_floating_point() else tensor
