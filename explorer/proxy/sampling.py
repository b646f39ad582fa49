"""How a reply is sampled, by its request.

The trainer recomputes log softmax(logits / temperature) of token ids. A reply that was sampled from anything else, such
as a nucleus or a grammar, is marked with the reason: methods that learn from any reply take it, policy gradients do
not. A reply that answers more than token ids is for none. docs/sampling.md tells it to users.
"""

import math
from collections.abc import Mapping
from typing import Any

from tuneloop.explorer.http.bodies import coerce_float, equals
from tuneloop.explorer.transcript import Sampling
from tuneloop.shared.errors import RequestRefused

#: Parameters that change the distribution, or where it is stopped, with the values that leave it alone.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "thinking_token_budget": (-1,),
    "repetition_detection": (),
    "logits_processors": ([],),
    "continue_final_message": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}

_BUDGET = "thinking_token_budget"

#: Of them, those that only cut tokens off: an engine with our plug-in tells which are left.
TRUNCATING = frozenset({"top_p", "top_k", "min_p"})

#: Parameters with which the reply answers not, or not only, the prompt's token ids, with the values that do nothing.
BEYOND_IDS: Mapping[str, tuple[object, ...]] = {
    "prompt_embeds": ([],),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}

#: Parts of a message that become token ids; vLLM takes others, such as images.
_WORDS = ("text", "input_text", "output_text", "refusal", "thinking")

#: vLLM decodes greedily at 0, and raises what is above it to this.
_LOWEST = 0.01


def sampling_of(request: Mapping[str, Any], *, default_temperature: float, holds_tools: bool = False) -> Sampling:
    """Read the sampling parameters of a request body. Raises RequestRefused for a temperature that is none.

    `holds_tools`: the engines may hold tool calls to a grammar of their own accord.
    """
    asked = request.get("temperature")  # a number may come as a string
    temperature = default_temperature if asked is None else coerce_float(asked, "temperature")
    if not 0 <= temperature < math.inf:
        raise RequestRefused("temperature must be a number from 0", code="invalid_value", param="temperature")
    temperature = max(temperature, _LOWEST) if temperature else 0.0
    others = _not_neutral(request, NEUTRAL) if temperature else ["temperature=0"]
    # Until it is reached it changes nothing, which the reply tells.
    budget = request.get(_BUDGET) if _BUDGET in others else None
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        others.remove(_BUDGET)
    else:
        budget = None
    changed = f"sampling:{others[0]}" if others else None
    held = None if changed else _why_held(request, holds_tools)
    beyond_ids = next((f"sampling:{name}" for name in _not_neutral(request, BEYOND_IDS)), None)
    messages = request.get("messages")
    if beyond_ids is None and isinstance(messages, list):
        contents = [each.get("content") for each in messages if isinstance(each, dict)]
        for part in (part for content in contents if isinstance(content, list) for part in content):
            if not (isinstance(part, str) or (isinstance(part, dict) and part.get("type") in _WORDS)):
                beyond_ids = "sampling:media"
    # Of a grammar, too, only what it allows is left.
    truncated = bool(others) and TRUNCATING.issuperset(others)
    return Sampling(
        temperature, changed or held, beyond_ids, by_grammar=held is not None, truncated=truncated, budget=budget
    )


def _why_held(request: Mapping[str, Any], holds_tools: bool) -> str | None:
    """Why the engine holds the reply to a grammar."""
    if request.get("structured_outputs") is not None:
        return "sampling:structured_outputs"
    if request.get("response_format") not in (None, {"type": "text"}):
        return "sampling:response_format"
    # vLLM holds tool calls to a grammar not only where one is required.
    choice, tools = request.get("tool_choice"), request.get("tools")
    if choice not in (None, "none", "auto"):
        return "sampling:tool_choice"
    if choice == "none" or not tools:
        return None
    parallel = request.get("parallel_tool_calls")
    if parallel is not None and not equals(parallel, True):
        return "sampling:parallel_tool_calls"
    if holds_tools:
        return "sampling:tools"
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        strict = function.get("strict") if isinstance(function, dict) else None
        if strict is not None and not equals(strict, False):
            return "sampling:tools"
    return None


def _not_neutral(request: Mapping[str, Any], parameters: Mapping[str, tuple[object, ...]]) -> list[str]:
    if parameters.keys().isdisjoint(request):
        return []
    return [
        name
        for name, neutral in parameters.items()
        if (value := request.get(name)) is not None and not any(equals(value, each) for each in neutral)
    ]
