"""What is compiled before there is a batch is what a step runs, and nothing else has happened."""

import pytest
import torch
from structlog.testing import capture_logs
from torch._dynamo.utils import counters

from tests.trainer.factories import sample
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.micro_batch import MicroBatch
from tuneloop.trainer.warm_up import warm_up

SAMPLES = [sample(i) for i in range(6)]
EACH = {"reinforce": {"algorithm_type": "reinforce", "kl_coef": 0.1}, "ppo": {"algorithm_type": "ppo", "kl_coef": 0.1}}


def state_of(learner: Learner) -> dict[str, object]:
    """Everything that a step would go on from."""
    weights = {
        f"{name}.{key}": value.clone()
        for name, optimizer in learner.optimizers.items()
        for key, value in optimizer.weights().items()
    }
    left = [name for name, each in learner.actor.network.named_parameters() if each.grad is not None]
    gradients = {name: len(each.gradients) for name, each in learner.optimizers.items()}
    return weights | {
        "left": left,
        "gradients": gradients,
        "steps": learner.steps,
        "baselines": learner.baselines,
        "random": (learner.generator.get_state().tolist(), torch.get_rng_state().tolist()),
    }


def same(one: object, other: object) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("method", EACH)
def test_each_model_is_run_as_a_step_runs_it_and_nothing_else_changes(settings, method):
    learner = snapshot.load(settings(algorithm=EACH[method]), None)
    runs: set[tuple[str, bool]] = set()
    models = {"actor": learner.actor.network.base_model, "reference": learner.reference.network.base_model}
    models |= {"critic": learner.critic.body} if learner.critic else {}
    for name, network in models.items():
        network.layers[0].register_forward_hook(lambda *_, name=name: runs.add((name, torch.is_grad_enabled())))
    before = state_of(learner)
    warm_up(learner, temperature=0.7, entropy=True)
    after = state_of(learner)
    assert [name for name, each in before.items() if not same(each, after[name])] == []
    warmed = set(runs)
    runs.clear()
    learner.step(SAMPLES)
    assert {("actor", True), ("reference", False)} <= runs <= warmed


def test_the_next_step_is_the_same_as_without(settings):
    cold, warm = (snapshot.load(settings(), None) for _ in range(2))
    warm_up(warm, temperature=1.0, entropy=False)
    told = [each.step(SAMPLES) for each in (cold, warm)]
    assert [{key: value for key, value in each.items() if not key.startswith(("time/", "perf/"))} for each in told] == [
        {key: value for key, value in told[0].items() if not key.startswith(("time/", "perf/"))}
    ] * 2
    before, after = state_of(cold), state_of(warm)
    assert [name for name, each in before.items() if not same(each, after[name])] == []


def test_what_is_not_compiled_is_not_warmed_up(settings):
    learner = snapshot.load(settings(), None)
    learner.actor.network.register_forward_hook(lambda *_: pytest.fail("it was run"))
    learner.actor.network.base_model.register_forward_hook(lambda *_: pytest.fail("it was run"))
    MicroBatch(settings()).warm_up(learner)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_a_step_after_it_compiles_nothing_more(settings):
    """torch's compiler on a CPU: a minute or more."""
    found = settings(trainer={"compile": True, "micro_batch_tokens": 4096}, model={"temperature": 0.7})
    learner, micro_batch = snapshot.load(found, None), MicroBatch(found)
    with capture_logs() as logs:
        micro_batch.warm_up(learner)
        micro_batch.warm_up(learner)
    assert [each["event"] for each in logs] == ["compiled"]
    graphs = counters["stats"]["unique_graphs"]
    micro_batch.step(learner, [sample(i, temperature=0.7) for i in range(6)], version=0)
    assert counters["stats"]["unique_graphs"] == graphs > 0
