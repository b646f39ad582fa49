"""Where an edited answer stands, by the chat templates of models that think."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from examples.sums.model import tokenizer
from tests.trainer.factories import sample
from tuneloop.trainer.batches.edited_answers import edited_answer_ids

TEMPLATES = Path(__file__).with_name("templates")

QWEN, R1, GLM = (
    "<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\n",
    "<|User|>When?<|Assistant|>",
    "<|user|>\nWhen?",
)
EMPTY, OFF = "<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def message(**fields: Any) -> str:
    return json.dumps({"role": "assistant"} | fields)


Spell = Callable[..., str]


@pytest.fixture
def spelled(settings: Any, tmp_path: Path) -> Spell:
    """Writes the target of an edited answer, or the reason why there is none."""

    def write(template: str, prompt: str, answer: str, reply: str = "It is due.", *, own_end: bool = True) -> str:
        words = tokenizer()
        folder = Path(mkdtemp(dir=tmp_path))  # a folder's tokenizer is read once
        words.chat_template = template if "{" in template else (TEMPLATES / f"{template}.jinja").read_text()
        tokens = ["<|user|>", "<|observation|>", "<|assistant|>", "<|User|>", "<|Assistant|>", "<|end_of_sentence|>"]
        words.add_special_tokens({"additional_special_tokens": tokens})
        ends = {"glm4_5": ["<|endoftext|>", "<|user|>", "<|observation|>"], "deepseek_r1": ["<|end_of_sentence|>"]}
        names = ends.get(template, ["<|im_end|>"])
        words.eos_token = names[0]
        words.save_pretrained(folder)
        eos = words.convert_tokens_to_ids(names)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        ids = words.encode(prompt), words.encode(reply + (names[-1] if own_end else ""))
        told = dict(zip(("prompt_ids", "completion_ids"), (np.array(each, np.int32) for each in ids), strict=True))
        chosen = settings(algorithm={"algorithm_type": "sft"}, model={"model_path": folder})
        found = edited_answer_ids(sample(9, **told), answer, chosen)
        return found if isinstance(found, str) else words.decode(found)

    return write


@pytest.mark.contract
@pytest.mark.parametrize(
    ("template", "prompt", "answer", "target"),
    [
        # The prompt has opened the block: it is closed before the answer.
        ("qwen3_5", QWEN + "<think>\n", "Monday.", "\n</think>\n\nMonday.<|im_end|>"),
        (
            "qwen3_5",
            QWEN + "<think>\n",
            message(content="Monday.", reasoning="Ships Friday."),
            "Ships Friday.\n</think>\n\nMonday.<|im_end|>",
        ),
        ("qwen3_5", QWEN + OFF, "Monday.", "Monday.<|im_end|>"),
        ("qwen3_5", QWEN + OFF, message(content="Monday.", reasoning_content="Hm."), "Monday.<|im_end|>"),
        # The model writes the block itself.
        ("qwen3", QWEN, "Monday.", EMPTY + "Monday.<|im_end|>"),
        ("qwen3", QWEN, message(content="Monday.", reasoning="Hm."), "<think>\nHm.\n</think>\n\nMonday.<|im_end|>"),
        ("qwen3", QWEN, "<think>\nHm.\n</think>\n\nMonday.", "<think>\nHm.\n</think>\n\nMonday.<|im_end|>"),
        ("qwen3", QWEN + OFF, "Monday.", "Monday.<|im_end|>"),
        # The template writes no block at all for a turn that is over.
        ("deepseek_r1", R1 + "<think>\n", "Monday.", "\n</think>\n\nMonday.<|end_of_sentence|>"),
        (
            "deepseek_r1",
            R1 + "<think>\n",
            message(content="Monday.", reasoning="Hm."),
            "Hm.\n</think>\n\nMonday.<|end_of_sentence|>",
        ),
        # The next turn's token ends the answer's.
        ("glm4_5", f"{GLM}<|assistant|>", "Monday.", "\n<think></think>\nMonday.<|user|>"),
        (
            "glm4_5",
            f"{GLM}<|assistant|>",
            message(content="Monday.", reasoning="Hm."),
            "\n<think>Hm.</think>\nMonday.<|user|>",
        ),
        ("glm4_5", f"{GLM}/nothink<|assistant|>\n<think></think>", "Monday.", "\nMonday.<|user|>"),
    ],
)
def test_an_answer_stands_behind_a_closed_think_block(
    spelled: Spell, template: str, prompt: str, answer: str, target: str
) -> None:
    assert spelled(template, prompt, answer) == target


def family(opens: str, closes: str, *, before: str = "", prompt: str = "") -> str:
    """A template that writes an answer's reasoning between these marks, and ends its prompt so."""
    thought = f"{{% if m.reasoning_content %}}{{{{ '{opens}' + m.reasoning_content + '{closes}' }}}}{{% endif %}}"
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        f"{thought}{before}{{% endif %}}{{{{ m.content }}}}"
        "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{prompt}{{% endif %}}"
    )


@pytest.mark.contract
@pytest.mark.parametrize(
    ("opens", "closes"),
    [
        ("[THINK]", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("<mm:think>", "</mm:think>"),
        ("<ifm|think_fast>", "</ifm|think_fast>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|channel>thought", "<channel|>"),
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    ],
)
def test_each_familys_own_think_block_is_closed_before_the_answer(spelled: Spell, opens: str, closes: str) -> None:
    template, call = family(opens, closes), message(content=None, tool_calls=[CALL])
    thought = message(content="Monday.", reasoning="Hm.")
    assert spelled(template, QWEN, "Monday.") == "Monday.<|im_end|>"
    assert spelled(template, QWEN, thought) == f"{opens}Hm.{closes}Monday.<|im_end|>"
    assert spelled(template, QWEN, f"{opens}Hm.{closes}Monday.") == f"{opens}Hm.{closes}Monday.<|im_end|>"
    assert spelled(template, QWEN, call) == "<call>add</call><|im_end|>"
    # The prompt opens the block, and the template leaves it out of a turn that is over.
    template = family(opens, closes, prompt=opens)
    assert spelled(template, QWEN + opens, "Monday.") == f"\n{closes}\n\nMonday.<|im_end|>"
    assert spelled(template, QWEN + opens, thought) == f"Hm.{closes}Monday.<|im_end|>"
    assert spelled(template, QWEN + opens, call) == f"\n{closes}\n\n<call>add</call><|im_end|>"


@pytest.mark.contract
def test_an_answer_stands_in_the_channel_where_the_template_puts_it(spelled: Spell) -> None:
    """As gpt-oss has it: the prompt ends before the channel."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if m.role == 'assistant' %}"
        "{% for c in m.tool_calls or [] %}{{ ' to=functions.' + c.function.name + '<|channel|>commentary<|message|>'"
        " + c.function.arguments | tojson + '<|im_end|>' }}{% endfor %}"
        "{% if m.content %}{{ '<|channel|>final<|message|>' + m.content + '<|im_end|>' }}{% endif %}"
        "{% else %}{{ '<|message|>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    prompt = "<|im_start|>user<|message|>When?<|im_end|><|im_start|>assistant"
    assert spelled(template, prompt, "Monday.") == "<|channel|>final<|message|>Monday.<|im_end|>"
    call = message(content=None, tool_calls=[CALL])
    told = ' to=functions.add<|channel|>commentary<|message|>{"a": 1}<|im_end|>'
    assert spelled(template, prompt, call) == told


@pytest.mark.contract
@pytest.mark.parametrize(
    ("template", "prompt", "target"),
    [
        ("qwen3", QWEN, EMPTY + 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'),
        (
            "qwen3_5",
            QWEN + "<think>\n",
            "\n</think>\n\nWell.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
            "<|im_end|>",
        ),
        (
            "glm4_5",
            f"{GLM}<|assistant|>",
            "\n<think></think>\nWell.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
            "<|observation|>",
        ),
    ],
)
def test_calls_of_tools_stand_behind_it_as_the_template_writes_them(
    spelled: Spell, template: str, prompt: str, target: str
) -> None:
    assert spelled(template, prompt, message(content="Well.", tool_calls=[CALL])) == target
    alone = spelled(template, prompt, message(content=None, tool_calls=[CALL]))
    assert alone.split("</think>")[1].strip() == target.split("Well.")[1].strip()


@pytest.mark.contract
def test_a_model_that_writes_a_block_which_its_template_leaves_out_is_taught_one(spelled: Spell) -> None:
    older = (TEMPLATES / "deepseek_r1.jinja").read_text().replace("<think>\\n", "")
    older = older.replace("<|end_of_sentence|>", "<|im_end|>")
    assert spelled(older, R1, "Monday.", reply="<think>\nHm.\n</think>\n\nIt is due.") == EMPTY + "Monday.<|im_end|>"
    assert spelled(older, R1, "Monday.") == "Monday.<|im_end|>"


def test_a_prompt_that_no_template_wrote_goes_on_with_the_text_alone(spelled: Spell) -> None:
    assert spelled("qwen3_5", "Once upon a time", " there was.", own_end=False) == " there was.<|im_end|>"
    assert spelled("qwen3", QWEN + "It arrives", " on Monday.") == " on Monday.<|im_end|>"


def test_a_block_that_the_prompt_has_begun_is_closed(spelled: Spell) -> None:
    assert spelled("qwen3_5", QWEN + "<think>\nIt ships", "Monday.") == "\n</think>\n\nMonday.<|im_end|>"


@pytest.mark.contract
def test_an_answer_whose_place_cannot_be_told_is_left_out_and_says_why(spelled: Spell) -> None:
    refuses = "{{ raise_exception('no') }}{# <think> #}"
    reason = "where the chat template puts the edited answer, behind the think block, is unknown"
    assert spelled(refuses, QWEN, "Monday.") == reason
    assert spelled("qwen3_5", "Once upon a time", message(content=None, tool_calls=[CALL])) == reason
    swallows = (TEMPLATES / "qwen3_5.jinja").read_text().replace("'\\n</think>\\n\\n' + content", "''")
    assert spelled(swallows, QWEN + "<think>\n", "Monday.") == reason


def test_a_model_that_does_not_think_learns_the_text_and_the_end_of_its_turn(spelled: Spell) -> None:
    plain = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert spelled(plain, QWEN, " Monday. ") == " Monday. <|im_end|>"
