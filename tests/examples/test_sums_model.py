"""The demo's model: small, deterministic, and speaking ChatML with tools."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from examples.sums import model as sums_model

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return sums_model.tokenizer()


def test_has_few_parameters() -> None:
    built, words = sums_model.build(seed=0)
    assert sum(weights.numel() for weights in built.parameters()) == 363_520
    assert built.config.vocab_size == len(words) == 256 + 9
    assert {weights.dtype for weights in built.parameters()} == {torch.float32}


def test_is_the_same_for_the_same_seed_and_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (sums_model.build(seed=seed)[0].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(state, torch.get_rng_state())


def test_the_folder_is_read_back_by_any_tool(tmp_path: Path) -> None:
    built, words = sums_model.build(seed=3)
    sums_model.save(built, words, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(weights, again.state_dict()[name]) for name, weights in built.state_dict().items())
    assert again.generation_config.eos_token_id == words.convert_tokens_to_ids("<|im_end|>")
    turn = [{"role": "user", "content": "3+4="}]
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert read.apply_chat_template(turn, tokenize=False) == words.apply_chat_template(turn, tokenize=False)


@pytest.mark.parametrize("text", ["3+4=", "Ünïcödé 漢字 🎈\n\t", "a<tool_call>b", "\x00\x7f"])
def test_any_text_survives_the_tokenizer(words: PreTrainedTokenizerFast, text: str) -> None:
    assert words.decode(words(text).input_ids) == text


def test_a_question_is_a_few_tokens(words: PreTrainedTokenizerFast) -> None:
    text = words.apply_chat_template([{"role": "user", "content": "3+4="}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n"
    assert len(words(text).input_ids) == 23


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
