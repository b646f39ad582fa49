"""Which of vLLM's parsers read the tool calls and the reasoning of which family of models."""

from typing import NamedTuple

from tuneloop.shared.capacity.model_shape import ModelShape


class Parsers(NamedTuple):
    """Names as vLLM knows them; None: none is known to fit, or the chat template has no use for one."""

    tool_calls: str | None
    reasoning: str | None


#: By the beginning of `model_type` in config.json, longer ones first; as vLLM's documentation of tool calling and of
#: reasoning outputs has them (0.26 to 0.32).
FAMILIES: dict[str, Parsers] = {
    "qwen3": Parsers("hermes", "qwen3"),
    "qwen2": Parsers("hermes", "deepseek_r1"),  # its reasoning models are distilled from DeepSeek-R1
    "llama4": Parsers("llama4_pythonic", None),
    "llama": Parsers("llama3_json", "deepseek_r1"),
    "ministral": Parsers("mistral", "mistral"),
    "mistral": Parsers("mistral", "mistral"),
    "gpt_oss": Parsers("openai", "openai_gptoss"),
    "deepseek_v3": Parsers("deepseek_v3", "deepseek_r1"),
    "gemma4": Parsers("gemma4", "gemma4"),
    "glm4_moe": Parsers("glm45", "glm45"),
    "granite": Parsers("granite", "granite"),
    "phi3": Parsers("phi4_mini_json", None),
    "olmo3": Parsers("olmo3", "olmo3"),
    "seed_oss": Parsers("seed_oss", "seed_oss"),
    "hunyuan_v1": Parsers("hunyuan_a13b", "hunyuan_a13b"),
    "minimax_m2": Parsers("minimax_m2", "minimax_m2"),
    "kimi_k2": Parsers("kimi_k2", "kimi_k2"),
}

_OTHERS = Parsers(None, None)

#: How chat templates begin what is thought.
_THOUGHTS = ("<think>", "enable_thinking", "[THINK]", "reasoning_content", "<|channel|>analysis")


def parsers_of(shape: ModelShape) -> Parsers:
    """The parsers for a model whose chat template knows tools, or thoughts."""
    names = sorted((name for name in FAMILIES if shape.family.startswith(name)), key=len)
    known = FAMILIES[names[-1]] if names else _OTHERS
    thinks = any(each in shape.template for each in _THOUGHTS)
    return Parsers(known.tool_calls if "tools" in shape.template else None, known.reasoning if thinks else None)
