"""What sft and raft imitate, and how an edited answer becomes a reply."""

import json
import shutil

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from examples.sums.model import build, save
from tests.constants import section_of
from tests.trainer.factories import sample
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.batches.selection import imitable, with_demonstrations
from tuneloop.trainer.batches.tokenizer import ends_of, tokenizer_of

#: The tokenizer's; the config of the tiny model names another one.
END = 256


def _algorithm(kind="sft", **options):
    return section_of(AlgorithmSettings, {"algorithm_type": kind, "sft": options})


def _left(refused):
    return {reason: [each.id for each in samples] for reason, samples in refused.items()}


def _taken(samples, algorithm):
    kept, refused = imitable(samples, algorithm)
    return [each.id for each in kept], _left(refused)


GOOD, EDGE, BAD = sample(0, reward=1.0), sample(1, reward=0.5), sample(2, reward=0.49)
EDITED = sample(3, reward=0.0, demonstration="so")
CUT = sample(4, reward=1.0, finish_reason="length")
ALL = [GOOD, EDGE, BAD, EDITED, CUT]
TOO_LOW, NOT_EDITED = "not imitated: its reward is below 0.5", "not imitated: it was not edited"
WORSE = "not imitated: another run of its group has a better reward"
CUT_OFF = "not imitated: it was cut off at its token limit"


@pytest.mark.parametrize(
    ("targets", "taken", "refused"),
    [
        ("both", [0, 1, 3], {TOO_LOW: [2], CUT_OFF: [4]}),
        ("replies", [0, 1], {TOO_LOW: [2, 3], CUT_OFF: [4]}),
        ("demonstrations", [3], {NOT_EDITED: [0, 1, 2, 4]}),
    ],
)
def test_what_sft_imitates_and_why_not_the_others(targets, taken, refused):
    assert _taken(ALL, _algorithm(targets=targets)) == (taken, refused)


def test_raft_imitates_all_calls_of_the_best_run():
    calls = [
        sample(number, reward=reward, group_id=7, task_id="t", run_id=run)
        for number, reward, run in ((0, 1.0, "a"), (1, 0.0, "a"), (2, 0.9, "b"), (3, 0.8, "b"), (4, 0.1, "b"))
    ]
    assert _taken(calls, _algorithm("raft")) == ([2, 3], {TOO_LOW: [1, 4], WORSE: [0]})
    alone = [msgspec.structs.replace(each, group_id=None) for each in calls]
    assert _taken(alone, _algorithm("raft")) == ([0, 2, 3], {TOO_LOW: [1, 4]})


def _demonstrated(settings, demonstration, **but):
    given = sample(9, demonstration=demonstration, **but)
    [edited], refused = with_demonstrations([given], settings(algorithm={"algorithm_type": "sft"}))
    assert refused == {}
    return given, edited


def test_an_edited_answer_is_the_reply_with_the_end_of_a_turn(settings, base):
    given, edited = _demonstrated(settings, "So: {x}")
    words = AutoTokenizer.from_pretrained(base)
    assert edited.completion_ids.tolist() == [*words.encode("So: {x}", add_special_tokens=False), END]
    assert edited.prompt_ids.tolist() == given.prompt_ids.tolist()
    assert (len(edited.logprobs), edited.temperature, edited.finish_reason) == (len(edited.completion_ids), 1.0, "stop")
    assert edited.id == given.id


def test_it_ends_as_the_model_s_own_reply_did(settings, base, tmp_path):
    folder = tmp_path / "two ends"
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [250, 251]}))
    changed = settings(algorithm={"algorithm_type": "sft"}, model={"model_path": folder})
    assert ends_of(folder, tokenizer_of(changed)) == [END, 250, 251, 257]
    for own, end in (([5, 251], 251), ([5, 6], END), ([], END)):
        ids = np.array(own, np.int32)
        given = sample(9, demonstration="x", completion_ids=ids, logprobs=np.zeros(len(own), np.float32))
        [edited], _ = with_demonstrations([given], changed)
        assert edited.completion_ids[-1] == end


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"role": "assistant", "content": [{"type": "text", "text": "x"}]}, "more than text"),
        ({"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}, "no place"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "no place"),
        ({"role": "assistant", "tool_calls": ["f"]}, "no place"),
        ({"role": "assistant", "tool_calls": 3}, "no place"),
        ({"role": "assistant", "content": "a\ud800"}, "not Unicode"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}, "no place"),
    ],
)
def test_an_answer_that_cannot_be_written_is_left_out_and_says_why(settings, answer, reason):
    given = sample(9, demonstration=json.dumps(answer))
    taken, refused = with_demonstrations([given], settings(algorithm={"algorithm_type": "sft"}))
    assert taken == []
    assert [reason in sentence for sentence in refused] == [True]


@pytest.mark.parametrize(
    ("config", "model", "longest"),
    [
        ({}, {}, 256),
        ({}, {"max_model_len": 100}, 100),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, {}, 512),
        ({"text_config": {"max_position_embeddings": 64}}, {}, 64),
    ],
)
def test_an_answer_longer_than_the_model_takes_is_left_out(settings, base, tmp_path, config, model, longest):
    folder = shutil.copytree(base, tmp_path / "model")
    config = json.loads((base / "config.json").read_bytes()) | config
    (folder / "config.json").write_text(json.dumps(config))
    chosen = settings(algorithm={"algorithm_type": "sft"}, model={"model_path": folder, **model})
    fits = longest - len(sample(9).prompt_ids) - 1
    given = [sample(9, demonstration="x" * fits), sample(9, demonstration="x" * (fits + 1))]
    taken, refused = with_demonstrations(given, chosen)
    assert len(taken) == 1
    assert refused == {f"the edited answer is too long: the model takes {longest} tokens with the prompt": given[1:]}


def test_calls_of_tools_are_written_by_the_chat_template(settings, tmp_path):
    folder = tmp_path / "chat"
    save(*build(), folder)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answer = json.dumps({"role": "assistant", "content": "Well.", "tool_calls": [call]})
    given = sample(9, demonstration=answer)
    changed = settings(algorithm={"algorithm_type": "sft"}, model={"model_path": folder})
    [edited], _ = with_demonstrations([given], changed)
    words = AutoTokenizer.from_pretrained(folder)
    said = 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert words.decode(edited.completion_ids) == said
