"""Out of GPU memory: the micro-batch is halved, the step made again, and the size remembered."""

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.trainer.factories import Waited, commit, eventually, sample
from tuneloop.shared.errors import EnvironmentRefused, SamplesRefused
from tuneloop.shared.experience import State
from tuneloop.shared.job_marks import touch_committed
from tuneloop.shared.ledger.ledger import BatchRules
from tuneloop.shared.settings.algorithm import OF_GROUPS
from tuneloop.trainer import loop
from tuneloop.trainer.algorithms import ALGORITHMS
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.loop import run
from tuneloop.trainer.micro_batch import MicroBatch
from tuneloop.trainer.models.model import Actor, is_checkpointing

ROWS = [sample(i) for i in range(4)]


def _full_after(monkeypatch, *, calls, room):
    """From so many micro-batches on, memory has room for those of at most so many tokens."""
    score, made = Actor.score, []

    def bounded(self, batch, *more):
        made.append(int(batch.lengths_B.sum()))
        if len(made) > calls and made[-1] > room:
            raise torch.OutOfMemoryError
        return score(self, batch, *more)

    monkeypatch.setattr(Actor, "score", bounded)
    return made


def _weights(learner):
    return {name: each.clone() for name, each in learner.actor.network.state_dict().items()}


def test_an_update_that_has_no_room_is_made_again_in_smaller_pieces(settings, monkeypatch):
    """It is the second of two: the first is not made again, and nothing was kept to go back to."""
    rows = [
        sample(i, completion_ids=np.arange(90, dtype=np.int32), logprobs=np.full(90, -5.7, np.float32))
        for i in range(8)
    ]
    chosen = settings(trainer={"micro_batch_tokens": 1024})
    expected = snapshot.load(chosen, None)
    expected.step(rows)
    learner, micro_batch = snapshot.load(chosen, None), MicroBatch(chosen)
    chosen.job_dir.mkdir(parents=True)
    made = _full_after(monkeypatch, calls=1, room=256)
    micro_batch.step(learner, rows, version=None)
    first, second, again, *parts = made
    assert second == again == sum(parts) > 256 >= max(parts)
    assert first > 256  # which had room, and is not made again
    assert (micro_batch.tokens, MicroBatch(chosen).tokens, learner.micro_batch_tokens) == (256, 256, 256)
    for name, each in _weights(expected).items():
        torch.testing.assert_close(_weights(learner)[name], each, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", sorted(ALGORITHMS.keys() - {"distill"}))
def test_a_warm_up_makes_all_passes_and_changes_nothing(settings, monkeypatch, kind):
    grouped = {"group_by": "task"} if kind in {*OF_GROUPS, "dpo"} else {}
    chosen = settings(algorithm={"algorithm_type": kind, "mini_batches": 1}, buffer=grouped)
    made, rows = _full_after(monkeypatch, calls=math.inf, room=0), [sample(i, group_id=i // 2) for i in range(4)]
    expected, learner = (snapshot.load(chosen, None) for _ in range(2))
    with capture_logs() as logs:
        MicroBatch(chosen).warm_up(learner)
    assert [each["event"] for each in logs] == ["step_warmed_up"]
    assert len(made) == 2
    assert (learner.steps, learner.spoilt, learner.baselines) == (0, False, {})
    assert all(each.grad is None for each in learner.actor.network.parameters())
    told, wanted = (each.step(rows) for each in (learner, expected))
    assert {name: each for name, each in told.items() if not name.startswith(("time/", "perf/"))} == {
        name: each for name, each in wanted.items() if not name.startswith(("time/", "perf/"))
    }
    for one, other in zip(learner.optimizers.values(), expected.optimizers.values(), strict=True):
        assert all(map(torch.equal, one.tensors(), other.tensors()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("shared", [True, False])
def test_the_first_step_is_warmed_up_while_rows_are_awaited(settings, ledger, monkeypatch, shared):
    """Beside an engine not before it runs."""
    monkeypatch.setattr(loop, "shares_gpu", lambda _: shared)
    warmed = []
    monkeypatch.setattr(MicroBatch, "warm_up", lambda self, learner: warmed.append(learner.steps))
    chosen, stop = settings(trainer={"total_steps": 1, "compile": True}), Waited()
    with torch.compiler.set_stance("force_eager"), ThreadPoolExecutor(1) as threads:
        trainer = threads.submit(run, chosen, stop)
        try:
            eventually(lambda: trainer.done() or stop.has_waited)
            assert warmed == ([] if shared else [0])
            touch_committed(chosen.job_dir)
            eventually(lambda: trainer.done() or warmed)
            commit(ledger, ROWS)
            trainer.result(60)
        finally:
            stop.set()
    assert warmed == [0]


@pytest.mark.parametrize("full", ["actor", "critic"])
def test_an_update_that_no_memory_is_left_for_is_refused_and_none_is_made_twice(settings, monkeypatch, full):
    """Of actor and critic, one after the other, at the first update: AdamW makes its memory then."""
    algorithm = {"algorithm_type": "ppo", "mini_batches": 1}
    chosen = settings(trainer={"micro_batch_tokens": 512}, algorithm=algorithm)
    learner = snapshot.load(chosen, None)
    chosen.job_dir.mkdir(parents=True)
    first = next(learner.optimizers[full].tensors())
    zeros_like, refused = torch.zeros_like, []

    def bounded(like, *more, **named):
        if like is first and not refused:
            refused.append(like)
            raise torch.OutOfMemoryError
        return zeros_like(like, *more, **named)

    monkeypatch.setattr(torch, "zeros_like", bounded)
    with pytest.raises(EnvironmentRefused, match="no room for AdamW's state"):
        MicroBatch(chosen).step(learner, ROWS, version=None)
    assert learner.optimizers["actor"].updates == 1
    assert learner.optimizers["critic"].updates == (full == "critic")
    assert learner.spoilt


def _room_for_kept_activations(monkeypatch, room, again=10**9):
    """Memory has room for so many tokens where activations are kept, and for `again` where they are made again."""
    score = Actor.score

    def bounded(self, batch, *more):
        if int(batch.lengths_B.sum()) > (again if is_checkpointing(self.network) else room):
            raise torch.OutOfMemoryError
        return score(self, batch, *more)

    monkeypatch.setattr(Actor, "score", bounded)


def _long(number, **but):
    return sample(number, completion_ids=np.arange(200, dtype=np.int32), logprobs=np.full(200, -5.7, np.float32), **but)


def _with_a_long_one():
    return [*ROWS, _long(4)]


def test_one_sequence_that_has_no_room_alone_has_its_activations_made_again(settings, monkeypatch):
    chosen, rows = settings(trainer={"micro_batch_tokens": 192}), _with_a_long_one()
    expected = snapshot.load(chosen, None)
    expected.step(rows)
    chosen.job_dir.mkdir(parents=True)
    _room_for_kept_activations(monkeypatch, 192)
    learner, micro_batch = snapshot.load(chosen, None), MicroBatch(chosen)
    micro_batch.step(learner, rows, version=None)
    assert micro_batch.tokens == 192, "it is not halved"
    for name, each in _weights(expected).items():
        torch.testing.assert_close(_weights(learner)[name], each, rtol=0, atol=1e-5)
    monkeypatch.undo()
    later = snapshot.load(chosen, None)
    MicroBatch(chosen).step(later, ROWS, version=None)
    assert is_checkpointing(later.actor.network), "it is remembered over a restart"
    never = settings(trainer={"micro_batch_tokens": 192, "activation_checkpointing": False})
    other = snapshot.load(never, None)
    MicroBatch(never).step(other, ROWS, version=None)
    assert not is_checkpointing(other.actor.network), "a setting that is written later counts more"


@pytest.mark.parametrize("kept", [True, False])
def test_a_row_that_has_no_room_alone_is_given_up_and_no_smaller_size_is_remembered(settings, monkeypatch, kept):
    """Neither where activations are kept by setting, nor where making them again does not help."""
    chosen = settings(trainer={"micro_batch_tokens": 192} | ({"activation_checkpointing": False} if kept else {}))
    chosen.job_dir.mkdir(parents=True)
    _room_for_kept_activations(monkeypatch, 192, again=192)
    learner, micro_batch, rows = snapshot.load(chosen, None), MicroBatch(chosen), _with_a_long_one()
    length = len(rows[4].prompt_ids) + 200
    for _ in range(3):
        with pytest.raises(SamplesRefused) as caught:
            micro_batch.step(learner, rows, version=None)
        [(reason, ids)] = caught.value.refused.items()
        assert ids == [4]
        assert f"a row of {length} tokens" in reason
    sentence = rf"^trainer\.micro_batch_tokens: one row of {length} tokens does not fit"
    with pytest.raises(EnvironmentRefused, match=sentence):
        micro_batch.step(learner, rows, version=None)
    assert MicroBatch(chosen).tokens == micro_batch.tokens == 192
    micro_batch.step(learner, ROWS, version=None)
    with pytest.raises(SamplesRefused):
        micro_batch.step(learner, rows, version=None)


def test_of_a_pair_both_are_given_up(settings, monkeypatch):
    chosen = settings(
        trainer={"micro_batch_tokens": 192, "activation_checkpointing": False},
        algorithm={"algorithm_type": "dpo"},
        buffer={"group_by": "task", "group_size": 2},
    )
    prompt = sample(0).prompt_ids
    rows = [sample(0), sample(1, prompt_ids=prompt), sample(2, prompt_ids=prompt), _long(3, prompt_ids=prompt)]
    _room_for_kept_activations(monkeypatch, 192)
    with pytest.raises(SamplesRefused) as caught:
        MicroBatch(chosen).step(snapshot.load(chosen, None), rows, version=None)
    assert list(caught.value.refused.values()) == [[2, 3]]


def test_what_is_left_alone_in_its_group_by_a_row_that_has_no_room_is_not_learnt_from(settings, ledger, monkeypatch):
    _room_for_kept_activations(monkeypatch, 192, again=192)
    runs = [{"task_id": task, "run_id": run, "reward": float(run)} for task in "ab" for run in "01"]
    commit(ledger, [_long(0, **runs[0]), *(sample(i, **runs[i]) for i in range(1, 4))])
    run(
        settings(
            trainer={"total_steps": 1, "micro_batch_tokens": 192},
            buffer={"group_by": "task", "group_size": 2, "train_batch_size": 2},
            algorithm={"algorithm_type": "grpo"},
        ),
        Event(),
    )
    counts = ledger.reports.counts()
    assert (counts[State.TRAINED], counts[State.DROPPED]) == (2, 2)
    reasons = {drop.reason.partition(":")[0] for drop in ledger.reports.facts(BatchRules(), drops=5).drops}
    assert "alone in its group" in reasons


def test_where_nothing_fits_it_is_one_sentence(settings, monkeypatch):
    chosen = settings(trainer={"micro_batch_tokens": 512})

    def full(self, samples, *, version=None):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(snapshot.Learner, "step", full)
    chosen.job_dir.mkdir(parents=True)
    learner = snapshot.load(chosen, None)
    with pytest.raises(EnvironmentRefused, match=r"^trainer\.micro_batch_tokens: not even 128 at once fit"):
        MicroBatch(chosen).step(learner, ROWS, version=0)


@pytest.mark.gpu
def test_on_a_gpu_that_is_too_small_the_step_is_made_in_smaller_pieces(tmp_path, settings):
    """The real thing: the same step on all of its memory, and on a part that holds the weights and little beside."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = Qwen3Config(vocab_size=32_000, num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, **shape)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    made = settings(model={"model_path": tmp_path / "model"}, trainer={"device": "cuda", "micro_batch_tokens": 1 << 20})
    rows = [
        sample(i, completion_ids=np.arange(1000, dtype=np.int32), logprobs=np.full(1000, -10.0, np.float32))
        for i in range(64)
    ]
    made.job_dir.mkdir(parents=True)
    before = _weights(snapshot.load(made, None))
    whole, expected, peak = _step_within(made, rows, None)
    smaller, weights, _ = _step_within(made, rows, peak)
    assert smaller < whole == 1 << 20
    assert MicroBatch(made).tokens == smaller
    # Rounding turns the sign of some of Adam's first steps, where a gradient is nearly 0.
    assert _distance(expected, weights) < 0.1 * _distance(expected, before)


def _distance(one, other):
    return float(sum((one[name].float() - each.float()).abs().sum() for name, each in other.items()))


def _step_within(made, rows, peak):
    """The micro-batch that a step came down to, the weights after it, and the most bytes that it took.

    With the `peak` of another one it has what it holds at rest, and 40 % of what that took beside.
    """
    learner, micro_batch = snapshot.load(made, None), MicroBatch(made)
    at_rest = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    room = 1.0 if peak is None else (at_rest + (peak - at_rest) * 0.4) / total
    torch.cuda.set_per_process_memory_fraction(room)
    torch.cuda.reset_peak_memory_stats()
    try:
        micro_batch.step(learner, rows, version=0)
        return micro_batch.tokens, _weights(learner), torch.cuda.max_memory_allocated()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        del learner
        torch.cuda.empty_cache()
