"""What transformers says a model answers: the truth that engines are compared with."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tuneloop.shared.checkpoints import Probe


class Oracle:
    """A model's log-probabilities in float32."""

    def __init__(self, folder: Path) -> None:
        # The other kernels leave out what Gemma 2 does to attention's logits.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model = model.eval()

    @torch.no_grad()
    def logprobs(self, prompt_ids: list[int], completion_ids: list[int], temperature: float = 1.0) -> list[float]:
        """One log-probability per completion id."""
        ids = torch.tensor([prompt_ids + completion_ids])
        logits = self._model(ids).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
        picked = torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion_ids)[:, None])
        return picked[:, 0].tolist()

    def probe(self, ids: list[int]) -> Probe:
        return Probe(prompt_ids=tuple(ids), logprobs=tuple(self.logprobs(ids[:1], ids[1:])), tolerance=1e-3)
