"""In the core of an engine: the log-probabilities of marked requests leave it as plain numbers.

vLLM slices three arrays for each request in each step, and sends each array by itself. Of a marked request one number
for each new token is sent, beside the tokens, in a field that is empty but for transfers of keys and values.
"""

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
        packed, others = model_runner_output.req_id_to_index, False
        if computed.logprob_token_ids is not None:  # gpu_worker.py leaves them out where all requests are marked
            packed, others = _packed_rows(self.requests, packed)
        if not others:
            model_runner_output.logprobs = None  # there is nobody to slice for
        outputs = update(self, scheduler_output, model_runner_output)
        _attach(outputs, packed, computed)
        return outputs

    scheduler.update_from_output = update_from_output


def _packed_rows(requests: dict[str, Any], rows: dict[str, int]) -> tuple[dict[str, int], bool]:
    """The rows of marked requests in what the model has computed; and whether there are others."""
    found, others = {}, False
    for request_id, row in rows.items():
        request = requests.get(request_id)
        if request is None:  # it has been given up
            continue
        if is_marked(request.sampling_params):
            found[request_id] = row
        else:
            others = True
    return found, others


def _attach(outputs: dict[int, Any], packed: dict[str, int], computed: Any) -> None:
    column, starts = computed.logprobs[:, 0].tolist(), computed.cu_num_generated_tokens
    for of_client in outputs.values():
        for output in of_client.outputs:
            row = packed.get(output.request_id)
            if row is None or not output.new_token_ids:
                continue
            start = row if starts is None else starts[row]
            output.new_logprobs = None
            numbers, beside = column[start : start + len(output.new_token_ids)], output.kv_transfer_params
            output.kv_transfer_params = {MARK: numbers} if beside is None else {**beside, MARK: numbers}
