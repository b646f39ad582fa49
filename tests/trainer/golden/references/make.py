"""Writes the fixtures beside it: what other trainers' functions make of random numbers, in float64.

    pip download --no-deps --only-binary :all: -d WHEELS trl==1.16.0 verl==0.9.1 openrlhf==0.11.2 areal==1.0.4 \
        liger-kernel==0.8.5 trinity-rft==0.6.0
    python -m tests.trainer.golden.references.make WHEELS

A file has `inputs`, which all of its cases share, and `cases`: package, version, function, settings, more inputs, and
outputs. `grad` is the gradient of the output `loss` by the log-probabilities (of the value loss: by the values; where
the inputs have `logits`: by those).
Sequences have unequal lengths and masked tokens in the middle of a reply. Booleans are masks, whole numbers indices.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.trainer.golden.references import actors, advantages, policies, preferences, tokens

FILES = policies.FILES | actors.FILES | advantages.FILES | preferences.FILES | tokens.FILES


def plain(value: Any) -> Any:
    """Tensors as nested lists."""
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def main(wheels: Path) -> None:
    """Every file, a case a line."""
    torch.set_num_threads(1)
    for name, make in FILES.items():
        inputs, cases = make(wheels)
        lines = ",\n".join("  " + json.dumps(plain(case)) for case in cases)
        head = ",\n".join(f"  {json.dumps(key)}: {json.dumps(plain(value))}" for key, value in inputs.items())
        text = f'{{"inputs": {{\n{head}\n}},\n"cases": [\n{lines}\n]}}\n'
        (Path(__file__).parents[1] / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
