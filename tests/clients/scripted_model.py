"""A model whose replies are a script: weights that vLLM samples from, and a task that an agent can go through.

Its attention and its feed-forward layer add nothing, so the next token depends on the last one alone. The chat template
ends a prompt with a token that says what is to come, and a chain of tokens follows from it, each a part of the reply.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.sums.model import END_OF_TEXT, IM_END, save, tokenizer

#: Tokens are bytes, and an agent's first request has some fifty thousand.
LONGEST = 131072

#: The logit of the token that the script has next; those of others are near 0.
_SURE = 40.0

_NO_TOOL = "<|no tool|>"


def write_scripted_model(folder: Path, calls: Mapping[str, str], last: str) -> Path:
    """A model that calls the tool of these that it is offered, with its arguments, and after any result says `last`."""
    scripts = {_NO_TOOL: [_NO_TOOL, last, IM_END]}
    for name, arguments in calls.items():
        parts = [f'<tool_call>\n{{"name": "{name}", ', f'"arguments": {arguments}', "}\n</tool_call> "]
        scripts[name] = [f"<|{name}|>", *parts, IM_END]
    words = tokenizer()
    known = words.get_vocab()
    added = [part for script in scripts.values() for part in script if part not in known]
    words.add_tokens([AddedToken(part, special=False, normalized=False) for part in added])
    words.chat_template += _choice(calls)
    model, ids = _model_that_sees_one_token(words), words.get_vocab()
    with torch.no_grad():
        for script in scripts.values():
            for before, after in pairwise(script):
                seen = model.model.embed_tokens.weight[ids[before]]
                seen = seen / seen.square().mean().sqrt()  # as the last norm makes it
                model.lm_head.weight[ids[after]] += _SURE * seen / seen.square().sum()
    save(model, words, folder)
    return folder


def _choice(calls: Mapping[str, str]) -> str:
    """The end of a template: the token that says what is to come."""
    offered = "(tools or []) | map(attribute='function') | map(attribute='name')"
    choices = "".join(
        f"{{%- if 'tool' not in messages | map(attribute='role') and '{name}' in {offered} %}}"
        f"{{%- set turn.name = '<|{name}|>' %}}{{%- endif %}}"
        for name in calls
    )
    begins = f"{{%- if add_generation_prompt %}}{{%- set turn = namespace(name='{_NO_TOOL}') %}}"
    return f"{begins}{choices}{{{{- turn.name }}}}{{%- endif %}}"


def _model_that_sees_one_token(words: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.convert_tokens_to_ids(END_OF_TEXT)}
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=False,
        **ends,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ends)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model
