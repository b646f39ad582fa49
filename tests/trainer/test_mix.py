"""Supervised rows of a file beside steps of reinforcement, and what a policy is held to that began elsewhere."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch

from tests.trainer.factories import commit, eventually, points, sample
from tests.trainer.test_policies import _adapters, _rows
from tests.trainer.test_policies import created as created
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import State
from tuneloop.shared.finetuning.lines import FileLine
from tuneloop.shared.settings.policies import settings_of_policy
from tuneloop.trainer.algorithms import sft
from tuneloop.trainer.algorithms.terms import Targets
from tuneloop.trainer.batches import rendered_lines
from tuneloop.trainer.batches.batch import assemble, collate
from tuneloop.trainer.batches.rendered_lines import MixedFile
from tuneloop.trainer.batches.tokenizer import tokenizer_of
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.loop import run

BATCH = [sample(i, temperature=1.0) for i in range(8)]
ROWS = [sample(i, temperature=1.0) for i in range(100, 107)]
ONE_UPDATE = {"mini_batches": 1, "epochs": 1, "algorithm_type": "reinforce", "kl_coef": 0.0}


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of lines that are right."""

    def read(file: Path, method: str) -> Iterator[FileLine]:
        assert method == "supervised"
        for number, line in enumerate(file.read_text().splitlines(), 1):
            yield FileLine(number=number, messages=json.loads(line)["messages"])

    monkeypatch.setattr(rendered_lines, "read_lines", read)


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    path = tmp_path / "conversations.jsonl"
    asked = [(f"{a}+{b}=", str(a + b)) for a in range(3) for b in range(3)]
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in asked]
    path.write_text("\n".join(json.dumps({"messages": each}) for each in turns))
    return path


def gradients(learner):
    found = learner.optimizers["actor"].gradients
    return {name: each.clone() for name, each in found.items()}


def test_the_gradient_is_both_losses_by_their_shares(settings):
    """Not a mean over all tokens: a file of long answers would drown the rewards."""
    chosen = settings(algorithm=ONE_UPDATE)
    sequences = assemble(BATCH, merge=False)
    learner = snapshot.load(chosen, None)
    targets, _ = learner._targets(sequences, batch := collate(sequences))
    learner.forward_backward(batch, targets)
    by_reward = gradients(learner)
    alone = snapshot.load(chosen, None)
    said = collate(assemble(ROWS, merge=False))
    goals = Targets(mask_BR=said.mask_BR, sampled_BR=said.sampled_BR)
    loss = sft.actor_loss(chosen.algorithm, goals, *alone.actor.score(said), goals.totals)
    loss.value.backward()
    alone.optimizers["actor"].add_up()
    imitated = gradients(alone)
    mixed = snapshot.load(chosen, None)
    mixed.mixed = MixedFile(ROWS, count=len(ROWS), share=0.25, seed=1)
    mixed.forward_backward(batch, targets)
    metrics = mixed.imitate(ROWS)
    assert metrics["actor/mix_loss"] == pytest.approx(float(loss.value.detach()), rel=1e-5)
    for name, each in gradients(mixed).items():
        torch.testing.assert_close(each, 0.75 * by_reward[name] + 0.25 * imitated[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("budget", [30, 100_000])
def test_it_does_not_matter_how_the_rows_are_cut(settings, budget):
    def step(tokens):
        learner = snapshot.load(settings(algorithm=ONE_UPDATE, trainer={"micro_batch_tokens": tokens}), None)
        learner.mixed = MixedFile(ROWS, count=5, share=0.5, seed=1)
        return learner.step(BATCH)["actor/mix_loss"], learner.actor.network.model.norm.weight.clone()

    loss, weights = step(budget)
    same_loss, same_weights = step(64)
    assert loss == pytest.approx(same_loss, rel=1e-4)
    torch.testing.assert_close(weights, same_weights, rtol=1e-4, atol=1e-5)


def test_each_row_comes_once_before_any_comes_again_and_steps_that_are_made_again_have_the_same():
    mixed = MixedFile(ROWS, count=3, share=0.5, seed=1)
    came = [row.id for step in range(7) for row in mixed.rows(step)]
    epochs = [came[at : at + 7] for at in (0, 7, 14)]
    assert all(sorted(each) == [row.id for row in ROWS] for each in epochs)
    assert len({tuple(each) for each in epochs}) == 3
    again = MixedFile(ROWS, count=3, share=0.5, seed=1)
    assert [row.id for row in again.rows(5)] == came[15:18]
    other = MixedFile(ROWS, count=3, share=0.5, seed=2)
    assert [row.id for step in range(7) for row in other.rows(step)] != came


def test_a_service_learns_both_and_goes_on_after_a_stop_as_if_there_were_none(
    settings, ledger, conversations, tmp_path
):
    mix = {"mix": {"file": conversations, "share": 0.5}}
    chosen = settings(algorithm=ONE_UPDATE | mix, trainer={"total_steps": 8})
    ledger.versions.ensure_base(chosen.model.model_path)
    commit(ledger, [sample(i) for i in range(32)])
    run(settings(algorithm=ONE_UPDATE | mix, trainer={"total_steps": 3}), Event())
    run(chosen, Event())
    losses = [value for _, value in points(chosen.tensorboard_dir / "trainer", "actor/mix_loss")]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.05
    # The same without a stop.
    alone = settings(algorithm=ONE_UPDATE | mix, trainer={"total_steps": 8}).model_copy(
        update={"checkpoint_root_dir": tmp_path / "alone"}
    )
    rows = MixedFile.of(alone)
    assert rows is not None
    assert len(rows.rows(0)) == 4  # half of all rows of a step
    words = tokenizer_of(alone)
    texts = {
        words.decode([*each.prompt_ids, *each.completion_ids[:-1]]) for step in range(3) for each in rows.rows(step)
    }
    assert texts == {f"{a}+{b}={a + b}" for a in range(3) for b in range(3)}


def test_what_cannot_be_learnt_is_told_before_the_first_step(settings, conversations, tmp_path):
    with pytest.raises(EnvironmentRefused, match=r"algorithm\.mix\.file: .*none\.jsonl cannot be read"):
        MixedFile.of(settings(algorithm={"mix": {"file": tmp_path / "none.jsonl"}}))
    long = tmp_path / "long.jsonl"
    turns = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y"}]
    long.write_text(conversations.read_text() + "\n" + json.dumps({"messages": turns}))
    with pytest.raises(EnvironmentRefused, match="line 10: it has more than the 256 tokens"):
        MixedFile.of(settings(algorithm={"mix": {"file": long}}, model={"max_model_len": 256}))
    unlearnt = tmp_path / "unlearnt.jsonl"
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0}]
    unlearnt.write_text(json.dumps({"messages": turns}))
    with pytest.raises(EnvironmentRefused, match="has nothing to be learnt"):
        MixedFile.of(settings(algorithm={"mix": {"file": unlearnt}}))


def test_policies_of_their_own_have_nothing_mixed_in(settings, conversations):
    chosen = settings(algorithm={"mix": {"file": conversations}})
    assert settings_of_policy(chosen, {"algorithm.algorithm_type": "sft"}).algorithm.mix.file is None


KL = {"algorithm_type": "reinforce", "kl_coef": 0.1, "mini_batches": 1}


def test_a_policy_is_held_to_its_parent_and_the_default_one_to_what_was_promoted_into_it(adapted, ledger, created):
    """A first step begins where the reference is: the divergence is 0, however far both are from the base model."""
    chosen = adapted(trainer={"total_steps": 3}, algorithm=KL | {"optimizer": {"lr": 1e-2}})
    first = created("first")
    _rows(ledger, first, range(100, 112))
    ledger.policies.pause(0)
    run(chosen, Event())
    versions = ledger.versions.of(first)
    versions.promote(learnt := versions.newest().version)
    second = ledger.policies.create("second", parent=learnt, by="ops").id
    promoted = ledger.policies.promote(first, by="ops")
    ledger.versions.promote(promoted)
    ledger.policies.pause(0, paused=False)
    ledger.policies.pause(first)
    _rows(ledger, second, range(200, 208))
    _rows(ledger, 0, range(300, 308))
    stop = Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, adapted(algorithm=KL | {"optimizer": {"lr": 1e-2}}), stop)
        try:
            eventually(lambda: running.done() or ledger.reports.counts()[State.TRAINED] == 28)
        finally:
            stop.set()
        running.result()
    curves = {
        name: [value for _, value in points(chosen.tensorboard_dir / f"trainer{name}", "actor/kl_loss")]
        for name in ("-first", "-second", "")
    }
    assert curves["-first"][0] == curves["-second"][0] == curves[""][0] == 0.0
    assert curves["-first"][-1] > 1e-5  # from the base model, where it began
    assert curves["-second"][1] > 0
    assert len(_adapters(ledger, 0)) >= 1
