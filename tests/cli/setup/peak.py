"""Two steps of a trainer: `python -m tests.cli.setup.peak X.yaml` prints the most memory that the process had."""

import resource
import sys
from pathlib import Path

import numpy as np
import torch

from tests.trainer.factories import sample
from tuneloop.shared.settings.loader import read_settings
from tuneloop.trainer import loop  # all that a trainer imports
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.models.model import device_of


def main() -> None:
    settings = read_settings(Path(sys.argv[1]), environment={}).valid_settings()
    on_gpu = device_of(settings).type == "cuda"
    random, tokens = np.random.default_rng(0), settings.trainer.micro_batch_tokens
    long = tokens // 4
    samples = [
        sample(
            number,
            prompt_ids=random.integers(0, 250, long // 2, dtype=np.int32),
            completion_ids=random.integers(0, 250, long - long // 2, dtype=np.int32),
            logprobs=random.normal(-5.7, 0.1, long - long // 2).astype(np.float32),
        )
        for number in range(8)
    ]
    learner = snapshot.load(settings, None)
    for _ in range(2):  # the second has AdamW's memory already
        learner.step(samples)
    assert loop.run is not None
    most = torch.cuda.max_memory_reserved() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    sys.stdout.write(f"{most}\n")


if __name__ == "__main__":
    main()
