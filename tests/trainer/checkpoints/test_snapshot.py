"""What is on disk: any tool loads the actor, and the learner goes on to the bit."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.factories import sample
from tuneloop.shared.checkpoints import PROBE_LENGTH, PROBE_ROOM
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.base_model import require_folders
from tuneloop.trainer.checkpoints import snapshot

pytestmark = pytest.mark.contract

BATCHES = [[sample(10 * step + i) for i in range(8)] for step in range(4)]


def _size(learner):
    return snapshot.size_of_weights(learner) + snapshot.size_of_state(learner)


def _contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_learner_goes_on_to_the_bit(settings, base, tmp_path, dtype):
    chosen = settings(trainer={"dtype": dtype})
    straight = snapshot.load(chosen, None)
    losses = [straight.step(batch)["actor/pg_loss"] for batch in BATCHES]
    snapshot.save(straight, tmp_path / "straight", base=base)

    first = snapshot.load(chosen, None)
    again = [first.step(batch)["actor/pg_loss"] for batch in BATCHES[:2]]
    snapshot.save(first, tmp_path / "half", base=base)
    second = snapshot.load(chosen, tmp_path / "half")
    again += [second.step(batch)["actor/pg_loss"] for batch in BATCHES[2:]]
    snapshot.save(second, tmp_path / "again", base=base)

    assert again == losses
    assert _contents(tmp_path / "again") == _contents(tmp_path / "straight")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_tool_can_load_the_actor_and_finds_the_probe_s_logprobs(settings, base, tmp_path, dtype):
    chosen = settings(trainer={"dtype": dtype})
    learner = snapshot.load(chosen, None)
    learner.step(BATCHES[0])
    snapshot.save(learner, tmp_path, base=base)
    probe = snapshot.probe(learner, chosen)()

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "actor", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "actor")
    assert str(model.dtype) == f"torch.{dtype}"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    with torch.no_grad():
        logits = model(torch.tensor([probe.prompt_ids])).logits[0, :-1].float()
    expected = logits.log_softmax(1).gather(1, torch.tensor(probe.prompt_ids[1:])[:, None])[:, 0]
    assert (expected - torch.tensor(probe.logprobs)).abs().mean() < 1e-5


def test_the_probe_is_a_fixed_row_of_ordinary_tokens(settings, base):
    learner = snapshot.load(settings(), None)
    probe = snapshot.probe(learner, settings())()
    special = AutoTokenizer.from_pretrained(base).all_special_ids
    assert len(probe.prompt_ids) == len(probe.logprobs) + 1 == PROBE_LENGTH
    assert max(probe.prompt_ids) < 256
    assert not set(special) & set(probe.prompt_ids)
    assert probe == snapshot.probe(learner, settings())()
    short = snapshot.probe(learner, settings(model={"max_model_len": 100}))()
    assert len(short.prompt_ids) == 100 - PROBE_ROOM


def test_the_configuration_is_the_base_model_s_own(settings, base, tmp_path):
    chosen = settings(trainer={"dtype": "bfloat16"})
    snapshot.save(snapshot.load(chosen, None), tmp_path, base=base)
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "actor", base))
    assert ours == theirs | {"dtype": "bfloat16"}


def test_a_smaller_type_keeps_its_master_weights_beside_it(settings, base, tmp_path):
    small = snapshot.load(settings(trainer={"dtype": "bfloat16"}), None)
    small.step(BATCHES[0])
    snapshot.save(small, tmp_path, base=base)
    name = "model.layers.0.mlp.up_proj.weight"
    master = load_file(tmp_path / "trainer_state" / "actor.safetensors")[f"master.{name}"]
    served = load_file(tmp_path / "actor" / "model.safetensors")[name]
    assert (master.dtype, served.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(master.bfloat16(), served)
    assert not torch.equal(master, served.float())


def test_the_size_is_known_before_it_is_written(settings, base, tmp_path):
    for dtype in ("float32", "bfloat16"):
        learner = snapshot.load(settings(trainer={"dtype": dtype}), None)
        learner.step(BATCHES[0])
        snapshot.save(learner, tmp_path / dtype, base=base)
        written = sum(len(data) for name, data in _contents(tmp_path / dtype).items() if name.endswith("safetensors"))
        assert _size(learner) == pytest.approx(written, rel=0.2)
        assert _size(learner) < written


def test_the_reference_is_always_the_base_model(settings, base, tmp_path):
    learner = snapshot.load(settings(), None)
    learner.step(BATCHES[0])
    snapshot.save(learner, tmp_path, base=base)
    loaded = snapshot.load(settings(), tmp_path)
    assert torch.equal(
        loaded.reference.network.model.embed_tokens.weight,
        load_file(base / "model.safetensors")["model.embed_tokens.weight"],
    )
    assert snapshot.load(settings(algorithm={"kl_coef": 0.0}), tmp_path).reference is None


def test_a_folder_that_is_no_model_is_named_with_its_setting(settings, base, tmp_path):
    with pytest.raises(EnvironmentRefused, match=r"model\.model_path: .*/nowhere is not there"):
        require_folders(settings(model={"model_path": tmp_path / "nowhere"}))
    with pytest.raises(EnvironmentRefused, match=r"model\.model_path: .* is not a model folder"):
        require_folders(settings(model={"model_path": tmp_path}))
    teacher = {"algorithm_type": "distill", "distill": {"teacher_path": tmp_path / "nobody"}}
    with pytest.raises(EnvironmentRefused, match=r"algorithm\.distill\.teacher_path: .*/nobody is not there"):
        require_folders(settings(algorithm=teacher))
    require_folders(settings(algorithm=teacher | {"algorithm_type": "ppo"}))


def test_weights_that_are_damaged_are_one_sentence(settings, base, tmp_path):
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(EnvironmentRefused, match=r"model\.model_path: the model in .* cannot be loaded"):
        snapshot.load(settings(model={"model_path": tmp_path}), None)


def test_a_model_without_a_tokenizer_is_refused(settings, base, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((base / name).read_bytes())
    chosen = settings(model={"model_path": tmp_path})
    with pytest.raises(EnvironmentRefused, match="tokenizer"):
        snapshot.probe(snapshot.load(chosen, None), chosen)


def test_what_an_older_trainer_saved_is_gone_on_from(settings, base, tmp_path):
    """It remembered nothing of rewards."""
    learner = snapshot.load(settings(), None)
    learner.step(BATCHES[0])
    snapshot.save(learner, tmp_path, base=base)
    state = tmp_path / "trainer_state" / "state.json"
    state.write_text(json.dumps({"steps": 1, "actor_updates": 2, "critic_updates": 2}))
    older = snapshot.load(settings(), tmp_path)
    assert (older.steps, older.baselines) == (1, {})
    assert {name: each.updates for name, each in older.optimizers.items()} == {"actor": 2, "critic": 2}


def test_another_method_goes_on_from_the_actor_and_learns_a_critic_anew(settings, base, tmp_path):
    without = snapshot.load(settings(algorithm={"algorithm_type": "reinforce"}), None)
    without.step(BATCHES[0])
    snapshot.save(without, tmp_path / "reinforce", base=base)
    ppo = snapshot.load(settings(), tmp_path / "reinforce")
    assert {name: each.updates for name, each in ppo.optimizers.items()} == {"actor": 2, "critic": 0}
    ppo.step(BATCHES[1])
    snapshot.save(ppo, tmp_path / "ppo", base=base)
    back = snapshot.load(settings(algorithm={"algorithm_type": "reinforce"}), tmp_path / "ppo")
    assert (back.steps, back.critic, back.baselines) == (2, None, without.baselines)
