"""In a worker on a GPU: of steps whose requests are all marked, one number a token leaves the GPU."""

import importlib
from typing import Any

from tuneloop.explorer.engines.packing.patching import find, is_marked, method


def install() -> None:
    """Change the sampler of vLLM's newer model runner, as it is in 0.26. Raises UnknownVllm."""
    module = "vllm.v1.worker.gpu.sample.sampler"
    sampler, score = find(module, "Sampler"), find(module, "compute_topk_scores")
    score_tokens = find("vllm.v1.worker.gpu.sample.logprob", "compute_token_logprobs")
    tensors, lists = find("vllm.v1.outputs", "LogprobsTensors"), find("vllm.v1.outputs", "LogprobsLists")
    add = method(sampler, "add_request", "req_idx", "prompt_len", "sampling_params")
    call = method(sampler, "__call__", "logits", "input_batch")
    method(sampler, "returns_logprobs", "idx_mapping_np")  # later ones gather what the ranks of a group have sampled

    class TokenScores(tensors):  # type: ignore[misc, valid-type]
        """The log-probabilities of sampled tokens, and nothing else."""

        def to_cpu_nonblocking(self) -> Any:
            return TokenScores(None, self.logprobs.to("cpu", non_blocking=True), None)

        def tolists(self, cu_num_generated_tokens: list[int] | None = None) -> Any:
            return lists(None, self.logprobs.cpu().numpy(), None, cu_num_generated_tokens)

    marked: set[int] = set()  # their places in the runner's batch
    only_marked = [False]

    def add_request(self: Any, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        (marked.add if is_marked(sampling_params) else marked.discard)(req_idx)
        add(self, req_idx, prompt_len, sampling_params)

    def sample(self: Any, logits: Any, input_batch: Any) -> Any:
        only_marked[0] = bool(marked) and marked.issuperset(input_batch.idx_mapping_np.tolist())
        try:
            return call(self, logits, input_batch)
        finally:
            only_marked[0] = False

    def compute_topk_scores(
        logits: Any, num_logprobs: int, sampled_token_ids: Any, cu_num_logits: Any = None, **more: Any
    ) -> Any:
        plain = not (num_logprobs or more.get("max_per_req_token_ids") or more.get("logits_mode"))
        if only_marked[0] and plain and cu_num_logits is None:
            return TokenScores(None, score_tokens(logits, sampled_token_ids.unsqueeze(-1)), None)
        return score(logits, num_logprobs, sampled_token_ids, cu_num_logits, **more)

    sampler.add_request, sampler.__call__ = add_request, sample
    importlib.import_module(module).compute_topk_scores = compute_topk_scores  # type: ignore[attr-defined]
