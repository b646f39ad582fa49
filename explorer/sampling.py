"""What a request asks of the sampler, and whether its reply is a sample of the policy that is trained.

The trainer recomputes log softmax(logits / temperature). A reply that was sampled from anything else, such as a nucleus
or a grammar, is kept with the reason but is not used for policy gradients.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from shared.errors import RequestRefused

#: Parameters that change the distribution, with the values that leave it alone.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
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
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "thinking_token_budget": (),
    "logits_processors": ([],),
    "continue_final_message": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}


#: vLLM decodes greedily below the one, and raises what is between them to the other.
_GREEDY, _LOWEST = 1e-5, 0.01


class Sampling(NamedTuple):
    """How a reply is sampled: its temperature, and why it is not on-policy, if it is not."""

    temperature: float
    off_policy: str | None


def sampling_of(request: Mapping[str, Any], *, default_temperature: float) -> Sampling:
    """Read the sampling parameters of a request body. Raises RequestRefused for a temperature that is none."""
    temperature = _temperature(request.get("temperature"), default_temperature)
    return Sampling(temperature, _why_off_policy(request, temperature))


def _temperature(asked: Any, default: float) -> float:
    """What vLLM makes of it: a number may come as a string."""
    try:
        temperature = default if asked is None else float(asked)
    except (TypeError, ValueError):
        temperature = math.nan
    if not 0 <= temperature < math.inf:
        raise RequestRefused("temperature must be a number from 0", code="invalid_value", param="temperature")
    return temperature if temperature < _GREEDY else max(temperature, _LOWEST)


def _why_off_policy(request: Mapping[str, Any], temperature: float) -> str | None:
    if temperature < _GREEDY:
        return "sampling:temperature=0"
    for name, neutral in _NEUTRAL.items():
        value = request.get(name)
        if value is not None and value not in neutral:
            return f"sampling:{name}"
    if request.get("response_format") not in (None, {"type": "text"}):
        return "sampling:response_format"
    if request.get("tool_choice") not in (None, "none", "auto"):
        return "sampling:tool_choice"
    return None
