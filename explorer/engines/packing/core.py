"""In the core of an engine: marked log-probabilities leave it as one array a step for each API server."""

from collections.abc import Set
from typing import Any

import numpy as np

from tuneloop.explorer.engines.packing.patching import (
    MARK,
    MASK,
    find,
    is_marked,
    mask_width,
    method,
    require_fields,
)

#: Bytes of a number.
_FLOAT = 4


def install() -> None:
    """Change vLLM's scheduler. Raises UnknownVllm."""
    scheduler = find("vllm.v1.core.sched.scheduler", "Scheduler")
    update = method(scheduler, "update_from_output", "scheduler_output", "model_runner_output")
    require_fields(find("vllm.v1.outputs", "ModelRunnerOutput"), "logprobs", "req_id_to_index")
    require_fields(find("vllm.v1.outputs", "LogprobsLists"), "logprob_token_ids", "logprobs", "cu_num_generated_tokens")
    output = find("vllm.v1.engine", "EngineCoreOutput")
    require_fields(output, "request_id", "new_token_ids", "new_logprobs", "kv_transfer_params")

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        computed = model_runner_output.logprobs
        if computed is None:
            return update(self, scheduler_output, model_runner_output)
        rows = model_runner_output.req_id_to_index
        # gpu_worker.py leaves token ids out where all requests are marked
        marked: Set[str] = rows.keys()
        masked: Set[str] = frozenset()
        if computed.logprob_token_ids is not None:  # those, too, that were cancelled
            of = self.requests
            marked = {each for each in rows if each not in of or is_marked(of[each].sampling_params)}
            masked = {each for each in marked if each in of and mask_width(of[each].sampling_params) > 1}
        if all_are := len(marked) == len(rows):
            model_runner_output.logprobs = None  # there is no request to slice for
        outputs = update(self, scheduler_output, model_runner_output)
        if marked:
            _attach([each for each in outputs.values() if all_are or _clear(each, marked)], rows, computed, masked)
        return outputs

    scheduler.update_from_output = update_from_output


def _clear(of_client: Any, marked: Set[str]) -> bool:
    """Take vLLM's own log-probabilities from the marked among these outputs; whether there are any."""
    found = [each for each in of_client.outputs if each.request_id in marked]
    for output in found:
        output.new_logprobs = None
    return bool(found)


def _attach(clients: list[Any], rows: dict[str, int], computed: Any, masked: Set[str] = frozenset()) -> None:
    """Give each API server's first output the numbers of all new tokens, and those left of the vocabulary."""
    starts = computed.cu_num_generated_tokens
    places: list[int] = []
    ends = []
    for of_client in clients:
        if starts is None:  # one token for each, if any: who samples no drafts
            places += [rows[each.request_id] for each in of_client.outputs if each.new_token_ids]
        else:
            for each in of_client.outputs:
                start = starts[rows[each.request_id]] if each.new_token_ids else 0
                places += range(start, start + len(each.new_token_ids))
        ends.append(len(places))
    if not places:
        return
    packed, start = computed.logprobs[:, 0][places].tobytes(), 0
    if masked:
        names = [name for each in clients for out in each.outputs for name in [out.request_id] * len(out.new_token_ids)]
        left = computed.logprobs[places, 1:] > -np.inf
        counts = left.sum(1, dtype=np.int32)
        # Where all that were looked at are left, there may be more.
        counts[(counts == left.shape[1]) | [name not in masked for name in names]] = 0
        left[counts == 0] = False
        kept_ids = computed.logprob_token_ids[places, 1:].astype(np.int32)
    for of_client, end in zip(clients, ends, strict=True):
        if end > start:
            first = of_client.outputs[0]
            numbers = packed[start * _FLOAT : end * _FLOAT]
            first.kv_transfer_params = {**(first.kv_transfer_params or {}), MARK: numbers}
            if masked and counts[start:end].any():
                kept = counts[start:end].tobytes() + kept_ids[start:end][left[start:end]].tobytes()
                first.kv_transfer_params[MASK] = kept
        start = end
