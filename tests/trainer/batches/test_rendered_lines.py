"""Lines of files as token ids: what the model's chat template writes, as an engine would be asked."""

import json
from typing import Any

import numpy as np
import pytest

from examples.sums.model import build, save
from tests.constants import settings_of
from tuneloop.shared.finetuning.lines import FileLine
from tuneloop.trainer.batches.rendered_lines import LineSkipped, answers_in, render
from tuneloop.trainer.batches.tokenizer import tokenizer_of

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
#: Loses the developer's turns, and those of the system but the first, without a word.
QWEN = "".join(
    (
        "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}",
        "{% for each in messages if each.role in ('user', 'assistant') %}",
        "<|im_start|>{{ each.role }}\n{{ each.content }}<|im_end|>\n{% endfor %}",
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    """Settings of a model that speaks ChatML with tools, or of one with another template."""

    def make(template=None, **but):
        folder = tmp_path_factory.mktemp("chatml")
        model, words = build(0)
        words.chat_template = template or words.chat_template
        save(model, words, folder)
        return settings_of({"mode": "train", "model": {"model_path": folder} | but})

    return make


def texts(settings: Any, *messages: dict[str, Any], tools: Any = None, **pair: Any) -> list[tuple[str, str]]:
    words = tokenizer_of(settings)
    line = FileLine(number=1, messages=list(messages), tools=tools, **pair)
    return [
        tuple(words.decode(np.frombuffer(ids, "<i4")) for ids in (each.prompt_ids, each.completion_ids))
        for learnt in answers_in(line)
        for each in render(learnt, tools, settings)
    ]


def said(role: str, content: Any, **but: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | but


def test_each_answer_stands_where_the_template_puts_it(chatml):
    turns = said("user", "1+1?"), said("assistant", "2"), said("user", "+1?"), said("assistant", '{"sum": 3}')
    begin = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert texts(chatml(), *turns) == [
        (begin, "2<|im_end|>"),
        (f"{begin}2<|im_end|>\n<|im_start|>user\n+1?<|im_end|>\n<|im_start|>assistant\n", '{"sum": 3}<|im_end|>'),
    ]


def test_a_call_is_learnt_and_its_result_is_read(chatml):
    turns = (
        said("user", "1+1?"),
        said("assistant", None, tool_calls=[CALL]),
        said("tool", [{"type": "text", "text": "2"}], tool_call_id="c1"),
        said("assistant", "Two."),
    )
    [(prompt, call), (after, answer)] = texts(chatml(), *turns, tools=TOOLS)
    assert json.dumps(TOOLS[0]["function"]["name"]) in prompt
    assert call == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert (
        after
        == f"{prompt}{call}\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer == "Two.<|im_end|>"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_that_a_template_loses_are_merged_as_for_an_engine(chatml, role):
    turns = said(role, "Be brief."), said("user", "1+1?"), said("developer", "In words."), said("assistant", "Two.")
    [(prompt, _)] = texts(chatml(QWEN), *turns)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nIn words.<|im_end|>\n<|im_start|>user\n1+1?")


def test_both_answers_of_a_pair_are_behind_the_same_prompt(chatml):
    pair = {"preferred": said("assistant", "2"), "rejected": said("assistant", "3")}
    [(prompt, better), (same, worse)] = texts(chatml(), said("user", "1+1?"), **pair)
    assert prompt == same
    assert (better, worse) == ("2<|im_end|>", "3<|im_end|>")


@pytest.mark.parametrize(
    ("content", "but", "told"),
    [
        ("2", {"max_model_len": 8}, "too long: 25 tokens, and the model takes 8"),
        ("", {}, "the answer is empty"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], {}, "a message is more than text"),
        ("\ud83d", {}, "the answer is not Unicode"),
    ],
)
def test_what_cannot_be_learnt_is_left_out_with_the_reason(chatml, content, but, told):
    with pytest.raises(LineSkipped, match=told):
        texts(chatml(**but), said("user", "1+1?"), said("assistant", content))


def test_where_a_template_refuses_a_line_it_is_left_out(chatml):
    with pytest.raises(LineSkipped, match="the chat template does not write it: no users here"):
        texts(chatml("{{ raise_exception('no users here') }}"), said("user", "1?"), said("assistant", "1"))
