"""Held-out evaluation with a real tiny model, and the files of tasks that are refused."""

import json
from threading import Event

import pytest
import torch
from structlog.testing import capture_logs

from tests.trainer.factories import commit, points, sample
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.evaluation.tasks import is_right, tasks_of
from tuneloop.shared.settings.versions import EvaluationSettings
from tuneloop.trainer.evaluation.evaluation import HeldOut
from tuneloop.trainer.loop import run
from tuneloop.trainer.models.model import Actor


@pytest.fixture
def held_out(settings, tmp_path):
    """Makes an evaluation of tasks; `but` are options of `monitor.evaluation`."""

    def make(*tasks, model=None, trainer=None, **but):
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
        options = {"path": path, "most_tokens": 6} | but
        chosen = settings(monitor={"evaluation": options}, model=model or {}, trainer=trainer or {})
        return chosen, HeldOut(chosen, tasks_of(chosen.monitor.evaluation))

    return make


def greedy(actor, ids, most):
    """Token by token, without a cache."""
    reply = []
    while len(reply) < most:
        with torch.no_grad():
            logits = actor.network(input_ids=torch.tensor([ids + reply]), use_cache=False).logits
        reply.append(int(logits[0, -1].argmax()))
        if reply[-1] == actor.network.generation_config.eos_token_id:
            break
    return reply


def words_of(asked, ids):
    return asked._tokenizer.decode(ids, skip_special_tokens=True)


def test_replies_are_what_greedy_decoding_gives_however_they_are_padded(held_out):
    prompts = ["a", "the quick brown fox", "7+5=", "jumps over " * 3]
    chosen, asked = held_out(*({"prompt": each, "answer": "?"} for each in prompts))
    actor = Actor.load(chosen, chosen.model.model_path)
    ids = [asked._tokenizer(each)["input_ids"] for each in prompts]
    expected = [words_of(asked, greedy(actor, each, 6)) for each in ids]
    assert len(set(expected)) > 1
    assert [words_of(asked, each) for each in asked._generate(actor, ids)] == expected
    _, alone = held_out(*({"prompt": each, "answer": "?"} for each in prompts), trainer={"micro_batch_tokens": 1})
    assert [len(part) for part in alone._batches()] == [1, 1, 1, 1]
    assert [len(part) for part in asked._batches()] == [2, 1, 1]


def test_the_score_is_the_share_of_right_answers_of_all_and_of_each_slice(held_out):
    chosen, asked = held_out({"prompt": "a", "answer": "?"})
    actor = Actor.load(chosen, chosen.model.model_path)
    said = {
        each: words_of(asked, asked._generate(actor, [asked._tokenizer(each)["input_ids"]])[0]) for each in ("a", "bc")
    }
    _, asked = held_out(
        {"prompt": "a", "answer": said["a"], "slice": "one"},
        {"messages": [{"role": "user", "content": "bc"}], "answer": said["bc"], "slice": "two"},
        {"prompt": "bc", "answer": "no such thing", "slice": "two"},
        {"prompt": "a", "answer": "no such thing"},
    )
    state = torch.get_rng_state()
    scored = asked.score(actor)
    assert scored.pop("time/evaluation") > 0
    assert scored == {"evaluation/score": 0.5, "evaluation/score/one": 1.0, "evaluation/score/two": 0.5}
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("judge", "answer", "reply", "right"),
    [
        ("exact", "12", " 12\n", True),
        ("exact", "12", "12.", False),
        ("contains", "12", "It is 12.", True),
        ("contains", "12", "1 2", False),
        ("contains", "12", "<think>12?</think> No: 13.", False),
        ("contains", "12", "<think>hm</think>12", True),
        ("regex", r"^\s*1\d$", "12", True),
        ("regex", r"^\s*1\d$", "21", False),
    ],
)
def test_judges(judge, answer, reply, right):
    assert is_right(answer, reply, EvaluationSettings(judge=judge)) is right


# In the loop.


def test_the_loop_evaluates_the_base_model_and_every_so_many_steps(settings, ledger, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "a", "answer": "no such thing"}\n')
    monitor = {"evaluation": {"path": path, "every": 2, "most_tokens": 4}}
    commit(ledger, [sample(i) for i in range(20)])
    for steps in (3, 5):
        chosen = settings(monitor=monitor, trainer={"total_steps": steps})
        run(chosen, Event())
    curves = chosen.tensorboard_dir / "trainer"
    assert points(curves, "evaluation/score") == [(0, 0.0), (2, 0.0), (4, 0.0)]
    assert points(curves, "drift/alarms") == [(step, 0.0) for step in (1, 2, 3, 4, 5)]


def test_an_evaluation_that_does_not_fit_is_skipped(settings, ledger, tmp_path, monkeypatch):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')

    def too_much(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(HeldOut, "_generate", too_much)
    commit(ledger, [sample(i) for i in range(4)])
    chosen = settings(monitor={"evaluation": {"path": path, "every": 1}}, trainer={"total_steps": 1})
    with capture_logs() as said:
        run(chosen, Event())
    assert [each["step"] for each in said if each["event"] == "evaluation_skipped"] == [0, 1]
    assert ledger.versions.newest().version == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        (b'{"prompt": "\xff"}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be an object"),
        ('{"prompt": "a"}', "`answer` must be text, and not empty"),
        ('{"prompt": "a", "answer": 12}', "write a number in quotes"),
        ('{"prompt": "a", "answer": " "}', "not empty"),
        ('{"answer": "b"}', "needs either `prompt` or `messages`"),
        ('{"prompt": "a", "messages": [], "answer": "b"}', "needs either"),
        ('{"prompt": "", "answer": "b"}', "`prompt` must be text"),
        ('{"messages": [], "answer": "b"}', "`messages` must be a list of messages"),
        ('{"messages": [{"role": "user"}], "answer": "b"}', "`messages` must be a list of messages"),
        ('{"messages": "hi", "answer": "b"}', "`messages` must be a list of messages"),
        ('{"prompt": "a", "answer": "b", "slice": 3}', "`slice` must be text"),
        ('{"prompt": "a", "answer": "(", "slice": "s"}', "`answer` is not a regular expression"),
        ('{"prompt": "a", "answer": "b", "format": "("}', '`format` must be "json" or a regular expression of Python'),
        ('{"prompt": "a", "answer": "b", "format": {"type": "json"}}', '`format` must be "json" or a regular'),
        ('{"prompt": "a", "answer": "b", "format": ""}', '`format` must be "json" or a regular expression'),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path, line, reason):
    path = tmp_path / "tasks.jsonl"
    good = b'{"prompt": "a", "answer": "b"}\n\n'
    path.write_bytes(good + (line if isinstance(line, bytes) else line.encode()) + b"\n" + good)
    with pytest.raises(EnvironmentRefused) as refused:
        tasks_of(EvaluationSettings(path=path, judge="regex"))
    assert f"monitor.evaluation.path: {path}, line 3: " in str(refused.value)
    assert reason in str(refused.value)
