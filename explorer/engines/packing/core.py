"""In the core of an engine: the log-probabilities of marked requests leave it as plain numbers.

vLLM slices three arrays for each request in each step, and sends each array by itself. Here one array goes to an API
server in a step, of one number for each new token, in a field that is empty but for transfers of keys and values.
"""

from collections.abc import Set
from typing import Any

from tuneloop.explorer.engines.packing.patching import MARK, find, is_marked, method, require_fields


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
        marked = rows.keys()  # gpu_worker.py leaves token ids out where all requests are
        if computed.logprob_token_ids is not None:
            marked = _marked_among(self.requests, rows)
        if len(marked) == len(rows):
            model_runner_output.logprobs = None  # there is nobody to slice for
        outputs = update(self, scheduler_output, model_runner_output)
        if marked:
            _attach(outputs, rows, marked, computed)
        return outputs

    scheduler.update_from_output = update_from_output


def _marked_among(requests: dict[str, Any], rows: dict[str, int]) -> Set[str]:
    """Those whose log-probabilities are packed; those, too, that have been given up."""
    return {each for each in rows if each not in requests or is_marked(requests[each].sampling_params)}


def _attach(outputs: dict[int, Any], rows: dict[str, int], marked: Set[str], computed: Any) -> None:
    """Give the first output of each API server a number for each new token of all its outputs, in their order."""
    column, starts = computed.logprobs[:, 0], computed.cu_num_generated_tokens
    for of_client in outputs.values():
        places: list[int] = []
        found = False
        for output in of_client.outputs:
            if output.request_id in marked:
                output.new_logprobs, found = None, True
            if count := len(output.new_token_ids):
                row = rows[output.request_id]
                start = row if starts is None else starts[row]
                places += range(start, start + count)
        if found and places:
            first = of_client.outputs[0]
            first.kv_transfer_params = {**(first.kv_transfer_params or {}), MARK: column[places].tobytes()}
