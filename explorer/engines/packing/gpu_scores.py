"""In a worker on a GPU: the row of the vocabulary that a log-probability is computed from is read in large pieces.

vLLM's kernel has some threads read 1 024 numbers of a row, and wait for each other, before they read the next, twice
over: with 150 000 tokens that is a twentieth of a small model's step, however few rows there are.
"""

import importlib
from typing import Any

from tuneloop.explorer.engines.packing.patching import UnknownVllm, find

_MODULE = "vllm.v1.worker.gpu.sample.logprob"
_PARAMETERS = [
    "output_ptr",
    "logits_ptr",
    "logits_stride",
    "topk_ids_ptr",
    "topk",
    "vocab_size",
    "BLOCK_SIZE",
    "TOPK_BLOCK_SIZE",
]
#: As measured on an H200; with more warps one of 64 threads would have more threads than a block may.
_PIECE, _WARPS = 32768, 16


def install() -> None:
    """Change how the kernel is run by vLLM's newer model runner, as it is in 0.26. Raises UnknownVllm."""
    kernel, score = find(_MODULE, "_topk_log_softmax_kernel"), find(_MODULE, "compute_token_logprobs")
    if (names := getattr(kernel, "arg_names", None)) != _PARAMETERS:
        raise UnknownVllm(f"{_MODULE}._topk_log_softmax_kernel takes {names}")
    float32 = importlib.import_module("torch").float32
    pieces = {"BLOCK_SIZE": _PIECE, "TOPK_BLOCK_SIZE": 1, "num_warps": _WARPS}

    def compute_token_logprobs(logits: Any, token_ids: Any) -> Any:
        rows, columns = token_ids.shape
        if columns != 1:  # others than the sampled token's, too
            return score(logits, token_ids)
        logprobs = logits.new_empty((rows, 1), dtype=float32)
        kernel[(rows,)](logprobs, logits, logits.stride(0), token_ids.long(), 1, logits.shape[1], **pieces)
        return logprobs

    importlib.import_module(_MODULE).compute_token_logprobs = compute_token_logprobs  # type: ignore[attr-defined]
