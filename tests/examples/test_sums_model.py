"""The demo's model: small, deterministic, and speaking ChatML with tools."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from examples.sums import model as sums_model

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return sums_model.tokenizer()


def test_is_the_same_for_the_same_seed_and_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (sums_model.build(seed=seed)[0].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(state, torch.get_rng_state())


def test_the_template_renders_tools_calls_and_results(words: PreTrainedTokenizerFast) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    messages = [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "3+4="},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
        {"role": "tool", "tool_call_id": "1", "content": "8"},
    ]
    text = words.apply_chat_template(messages, tools=[ADD], tokenize=False, add_generation_prompt=True)
    head, body = text.rsplit("</tools>", 1)
    assert head.startswith("<|im_start|>system\nCount.\n\n# Tools")
    assert '"name": "add"' in head
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{one}\n{one}<|im_end|>\n" in body
    assert body.endswith(
        "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
