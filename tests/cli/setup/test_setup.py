"""`tuneloop init` and `tuneloop plan`: what they write and reckon, and how they refuse."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_main import tuneloop
from tuneloop.cli.capacity_plan import ExperimentPlan, make_plan
from tuneloop.cli.init import FAMILIES, parsers_of, settings_text
from tuneloop.shared.capacity.memory import GIB, reckon, version_disk
from tuneloop.shared.capacity.model_shape import ModelShape, read_shape
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.algorithm import OptimizerSettings
from tuneloop.shared.settings.loader import read_settings
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.training import TrainerSettings

QWEN3_06B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
TOOLS = "{% if tools %}{% endif %}{% if enable_thinking %}<think>{% endif %}"


QWEN3_4B = {
    "weights": 4_022_468_096,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}

QWEN3_8B: dict[str, int] = {
    "weights": 8_190_735_360,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}

QWEN3_14B: dict[str, int] = {
    "weights": 14_768_307_200,
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "tie_word_embeddings": False,
}


def model_folder(folder: Path, weights: int = 596_049_920, template: str = TOOLS, **but: object) -> Path:
    """A folder that looks like a model's: a configuration, and a header without the weights that it tells of."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_06B | but))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [weights], "data_offsets": [0, 2 * weights]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def settings_of(folder: Path, **sections: object) -> Settings:
    tree = {"checkpoint_root_dir": folder.parent, "model": {"model_path": folder}, "cluster": {"gpu_per_node": 1}}
    shared = {"explorer": {"rollout_model": {"gpu_memory_utilization": 0.4}}}
    return Settings.model_validate(tree | shared | sections)


def whole_training(folder: Path, kind: str, workers: int, shape: dict[str, int], tokens: int | None) -> Settings:
    """All weights, with moments in 8 bits, activations made again and no reference."""
    return settings_of(
        model_folder(folder, **shape),  # type: ignore[arg-type]
        mode="train",
        cluster={"gpu_per_node": workers},
        algorithm={"algorithm_type": kind, "kl_coef": 0.0, "optimizer": {"bits": 8}},
        trainer={"micro_batch_tokens": tokens, "activation_checkpointing": True},
    )


@pytest.mark.parametrize(
    ("kind", "tokens", "compiled", "shape", "measured"),
    [
        ("ppo", 8192, None, {}, 34.4),
        ("ppo", 16384, None, {}, 44.1),
        ("ppo", 32768, None, {}, 61.3),
        ("reinforce", 32768, None, {}, 51.3),
        ("sft", 8192, None, {}, 23.3),
        ("ppo", 8192, False, {}, 40.9),
        ("sft", 32768, False, {}, 76.5),
        ("sft", 8192, None, QWEN3_4B, 102.3),
    ],
)
def test_the_trainers_memory_is_what_was_measured_on_an_h200(
    tmp_path: Path, kind: str, tokens: int, compiled: bool | None, shape: dict[str, int], measured: float
) -> None:
    found = read_shape(model_folder(tmp_path / "m", **shape))  # type: ignore[arg-type]
    trainer = {"micro_batch_tokens": tokens, "compile": compiled}
    algorithm = {"algorithm_type": kind, "kl_coef": 0.0 if kind == "sft" else 0.001}
    memory = reckon(settings_of(tmp_path / "m", algorithm=algorithm, trainer=trainer), (found, found, None))
    assert memory.total / GIB == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(
    ("kind", "tokens", "workers", "shape", "measured"),
    [
        ("sft", 16384, 1, QWEN3_4B, 52.8),
        ("sft", 16384, 2, QWEN3_8B, 58.0),
        ("ppo", 8192, 2, QWEN3_8B, 98.3),
    ],
)
def test_each_workers_memory_is_what_was_measured_on_two_h200s(
    tmp_path: Path, kind: str, tokens: int, workers: int, shape: dict[str, int], measured: float
) -> None:
    settings = whole_training(tmp_path / "m", kind, workers, shape, tokens)
    found = read_shape(tmp_path / "m")
    memory = reckon(settings, (found, found, None))
    assert memory.total / GIB == pytest.approx(measured, rel=0.1)
    assert (memory.gathered > 0) == (workers > 1)


@pytest.mark.parametrize(
    ("kind", "workers", "shape", "fits"),
    [
        ("ppo", 2, QWEN3_8B, True),
        ("sft", 2, QWEN3_14B, True),
        ("ppo", 1, QWEN3_8B, False),
        ("sft", 1, QWEN3_14B, False),
        ("ppo", 2, QWEN3_14B, False),
        ("ppo", 4, QWEN3_14B, True),
    ],
)
def test_a_plan_says_whether_all_weights_can_be_trained_on_gpus_of_141_gb(
    tmp_path: Path, kind: str, workers: int, shape: dict[str, int], fits: bool
) -> None:
    settings = whole_training(tmp_path / "m", kind, workers, shape, None)
    plan = make_plan(settings, gpu_bytes=141 * 10**9, speed=1e9)
    problems = [each for each in plan.problems if each.startswith("GPU")]
    assert len(problems) == (0 if fits else workers)
    for each in problems:
        assert "trainer.workers" in each
        assert "train an adapter" in each
        assert "optimizer.bits" not in each  # they are in 8 already
    thirty_two = settings.algorithm.model_copy(update={"optimizer": OptimizerSettings()})
    wider = make_plan(settings.model_copy(update={"algorithm": thirty_two}), gpu_bytes=10**10, speed=1e9)
    assert sum("algorithm.optimizer.bits: 8" in each for each in wider.problems if each.startswith("GPU")) == workers


def test_workers_share_what_is_trained_and_hold_adapters_and_their_base_each(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", **QWEN3_8B)  # type: ignore[arg-type]
    found = read_shape(folder)
    whole, shared, adapter, adapters = (
        reckon(
            settings_of(
                folder,
                mode="train",
                cluster={"gpu_per_node": workers},
                model={"model_path": folder, "lora": {"rank": rank}},
                trainer={"micro_batch_tokens": 8192, "optimizer_offload": rank > 0},
            ),
            (found, found, None),
        )
        for rank in (0, 16)
        for workers in (1, 4)
    )
    assert whole.reference == 2 * found.weights
    for part in ("weights", "optimizer", "gradients", "reference"):
        assert getattr(shared, part) == pytest.approx(getattr(whole, part) / 4, rel=1e-9)
    # Each worker has a share, and the first, between steps and without gradients, the whole actor besides.
    assert shared.total - shared.gradients >= shared.weights + shared.optimizer + 2 * found.weights
    assert adapters.total == adapter.total
    assert adapters.offloaded == 4 * adapter.offloaded


@pytest.mark.parametrize(("again", "measured"), [(False, 63.2), (True, 25.0)])
def test_one_h200_holds_ppo_of_8_b_with_two_adapters(tmp_path: Path, again: bool, measured: float) -> None:
    """Measured by a loop of torch's own parts, in GB."""
    folder = model_folder(tmp_path / "m", **QWEN3_8B)  # type: ignore[arg-type]
    trainer = {"micro_batch_tokens": 8192, "activation_checkpointing": again}
    model = {"model_path": folder, "lora": {"rank": 32}}
    plan = make_plan(settings_of(folder, mode="train", model=model, trainer=trainer), gpu_bytes=141 * 10**9, speed=1e9)
    assert [each for each in plan.problems if "GPU" in each] == []
    assert plan.trainer is not None
    assert plan.trainer.total / 1e9 == pytest.approx(measured, rel=0.25)
    adapter = 2 * 87_293_952
    assert plan.trainer.weights == 2 * 8_190_735_360 + 2 * adapter
    assert (plan.disk.newest, plan.disk.older) == (2 * 14 * 87_293_952, adapter)


def test_a_plan_reckons_the_adapters_of_policies(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", **QWEN3_8B)  # type: ignore[arg-type]
    cluster, rollout = {"gpu_per_node": 1}, {"gpu_memory_utilization": 0.5, "dtype": "bfloat16"}
    trainer, explorer = {"dtype": "bfloat16", "micro_batch_tokens": 1024}, {"rollout_model": rollout}

    def plan(resident: int, policies: int) -> ExperimentPlan:
        model = {"model_path": folder, "lora": {"rank": 16, "max_rank": 32, "resident": resident}}
        named: Any = {f"p{number}": {} for number in range(policies)}
        found = settings_of(
            folder, model=model, cluster=cluster, policies=named, trainer=trainer, explorer=explorer, mode="both"
        )
        return make_plan(found, gpu_bytes=141 * 10**9, speed=1e9)

    few, many = plan(8, 0), plan(64, 3)
    served = 2 * 87_293_952  # of rank 32, in bfloat16
    assert few.engine is not None
    assert many.engine is not None
    assert (few.engine.adapters, many.engine.adapters) == (8 * served, 64 * served)
    assert few.engine.cache - many.engine.cache == 56 * served
    learnt = 2 * 14 * 87_293_952 // 2  # actor and critic of rank 16: weights, float32 masters, moments
    assert few.main_memory["adapters of policies"] == 16 * served
    assert many.main_memory["adapters of policies"] == 72 * served + 3 * learnt


def test_the_disk_of_versions_is_that_of_the_operations_page(tmp_path: Path) -> None:
    shape = read_shape(model_folder(tmp_path / "m", weights=600_000_000))
    disk = version_disk((shape, shape, None), settings_of(tmp_path / "m"))
    assert (disk.newest, disk.older) == (28 * 600_000_000, 2 * 600_000_000)
    assert disk.all == 2 * disk.newest + 5 * disk.older


def test_a_head_that_is_the_embeddings_counts_once(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", vocab_size=10, hidden_size=4)
    tensors = {"model.embed_tokens.weight": [10, 4], "lm_head.weight": [10, 4], "x": [2]}
    header = json.dumps({name: {"shape": shape, "data_offsets": [0, 8]} for name, shape in tensors.items()}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert read_shape(folder).weights == 42


def test_a_plan_says_which_gpus_idle_and_what_does_not_fit(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    four = settings_of(folder, cluster={"gpu_per_node": 4}, explorer={"rollout_model": {"engine_num": 2}})
    plan = make_plan(four, gpu_bytes=141 * 10**9, speed=1e9)
    assert plan.on_gpus == {0: ["engine 0"], 1: ["engine 1"], 2: ["trainer 0"], 3: ["trainer 1"]}
    one = make_plan(four.model_copy(update={"trainer": TrainerSettings(workers=1)}), gpu_bytes=141 * 10**9, speed=1e9)
    assert one.on_gpus[3] == ["spare engine"]
    one_trains = settings_of(folder, mode="train", cluster={"gpu_per_node": 2}, trainer={"workers": 1})
    assert make_plan(one_trains, gpu_bytes=141 * 10**9, speed=1e9).on_gpus[1] == []
    assert [each for each in plan.problems if "GPU" in each] == []
    assert plan.publish_s == pytest.approx(16.7, rel=0.01)
    fixed = settings_of(folder, trainer={"micro_batch_tokens": 8192})
    [problem] = [each for each in make_plan(fixed, gpu_bytes=48 * 10**9, speed=1e9).problems if "GPU" in each]
    assert problem.startswith("GPU 0 is too small: engine 0 and trainer take")


def test_a_plan_is_told_people_and_programs(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", weights=1_000_000)
    file = tmp_path / "x.yaml"
    file.write_text(
        f"checkpoint_root_dir: {tmp_path}\nmodel: {{model_path: {folder}, max_model_len: 512}}\n"
        "trainer: {micro_batch_tokens: 128}\n"
    )
    code, out, error = tuneloop("plan", file)
    assert (code, error) == (0, "")
    assert [line.split()[0] for line in out.splitlines() if line[0] != " "] == [
        *("Model", "Explorer", "Engines", "Trainer", "Disk", "Publishing"),
    ]
    told = json.loads(tuneloop("plan", file, "--json")[1])
    assert told["trainer_bytes"]["optimizer"] == 2 * 8 * (1_000_000)  # the actor's and the critic's
    assert (told["problems"], told["gpus"], told["idle_gpus"]) == ([], 0, [])
    assert told["publish_seconds"] > 0


@pytest.mark.parametrize("command", ["plan", "init"])
def test_a_folder_without_a_model_is_refused_in_a_sentence(tmp_path: Path, command: str) -> None:
    (tmp_path / "empty").mkdir()
    for folder, said in ((tmp_path / "none", "is not there"), (tmp_path / "empty", "is not a model folder")):
        file = tmp_path / "x.yaml"
        if command == "plan":
            file.write_text(f"model: {{model_path: {folder}}}\n")
            code, _, error = tuneloop("plan", file)
        else:
            code, _, error = tuneloop("init", file, "--model", folder, "--gpus", 0, "--where", tmp_path)
            assert not file.exists()
        assert code == 3
        assert error.startswith(f"model.model_path: {folder} {said}")


def test_init_writes_what_validate_takes_and_plan_finds_room_for(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", weights=1_000_000, hidden_size=64, vocab_size=300)
    file = tmp_path / "x.yaml"
    answers = ("--model", folder, "--gpus", 0, "--where", tmp_path / "data")
    code, out, error = tuneloop("init", file, *answers)
    assert (code, error) == (0, "")
    assert f"tuneloop run {file}" in out
    text = file.read_text()
    assert "tool_call_parser: hermes" in text
    assert "reasoning_parser: qwen3" in text
    assert tuneloop("validate", file)[0] == 0
    assert tuneloop("plan", file)[0] == 0
    told = json.loads(tuneloop("init", tmp_path / "z.yaml", *answers, "--json")[1])
    assert told == {"file": str(tmp_path / "z.yaml"), "settings": yaml.safe_load((tmp_path / "z.yaml").read_text())}
    again = tuneloop("init", file, *answers)
    assert (again[0], again[2]) == (3, f"{file} is there already; name another file, or move that one away\n")
    assert file.read_text() == text
    assert tuneloop("init", tmp_path / "y.yaml")[2] == "there is no terminal to ask on: give --model\n"


@pytest.mark.parametrize(
    ("gpus", "gb", "expected"),
    [
        (1, 141, ("ppo", 0, 1, 16384)),
        (1, 48, ("ppo", 0, 1, 8192)),
        (1, 24, ("reinforce", 16, 1, 8192)),
        (2, 80, ("ppo", 0, 1, 16384)),
        (4, 80, ("ppo", 0, 3, 16384)),
    ],
)
def test_init_shares_gpus_out_so_that_it_fits(tmp_path: Path, gpus: int, gb: int, expected: tuple[object, ...]) -> None:
    shape = read_shape(model_folder(tmp_path / "m"))
    file = tmp_path / "x.yaml"
    file.write_text(settings_text(shape, tmp_path, gpus=gpus, gpu_bytes=gb * 10**9))
    settings = read_settings(file, environment={}).valid_settings()
    rollout, method = settings.explorer.rollout_model, settings.algorithm.algorithm_type
    found = (method, settings.model.lora.rank, rollout.engine_num, settings.trainer.micro_batch_tokens)
    assert found == expected
    problems = make_plan(settings, gpu_bytes=gb * 10**9, speed=1e9).problems
    assert [each for each in problems if not each.startswith("checkpoint_root_dir")] == []


def main_memory_problems(settings: Settings, *, gpu_bytes: int | None, free: int) -> list[str]:
    problems = make_plan(settings, gpu_bytes=gpu_bytes, speed=1e9, free=free).problems
    return [each for each in problems if "main memory" in each]


def test_what_main_memory_does_not_hold_is_a_problem(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", weights=30_000_000_000)
    alone = settings_of(folder, cluster={"gpu_per_node": 0}, algorithm={"algorithm_type": "reinforce"})
    [problem] = main_memory_problems(alone, gpu_bytes=None, free=23 * 10**9)
    assert re.match(
        r"model\.model_path: main memory is too small: the engine [\d.]+ GB, the trainer [\d.]+ GB, the "
        r"explorer [\d.]+ GB, 23\.0 GB are free; choose a smaller model",
        problem,
    )
    assert main_memory_problems(alone, gpu_bytes=None, free=10**13) == []
    on_gpus = settings_of(folder, cluster={"gpu_per_node": 8}, mode="train")
    assert main_memory_problems(on_gpus, gpu_bytes=10**12, free=10**9) == []
    two = settings_of(folder, cluster={"gpu_per_node": 0}, mode="train", trainer={"workers": 2})
    plan = make_plan(two, gpu_bytes=None, speed=1e9)
    assert plan.trainer is not None
    assert plan.main_memory["the trainer"] == 2 * plan.trainer.total


def test_one_gpu_that_is_too_small_is_said_to_be_so(tmp_path: Path) -> None:
    shape = read_shape(model_folder(tmp_path / "m", weights=8_000_000_000))
    with pytest.raises(EnvironmentRefused, match=r"one GPU of 12 GB is too small for .*m: neither all 8.0 B weights"):
        settings_text(shape, tmp_path, gpus=1, gpu_bytes=12 * 10**9)


@pytest.mark.parametrize(
    ("family", "template", "expected"),
    [
        ("qwen2", "{{ tools }}", ("hermes", None)),
        ("qwen3_moe", TOOLS, ("hermes", "qwen3")),
        ("llama", "{{ tools }}", ("llama3_json", None)),
        ("mistral", "{{ tools }}", ("mistral", None)),
        ("qwen3", "{{ messages }}", (None, None)),
        ("unheard_of", TOOLS, (None, None)),
    ],
)
def test_parsers_go_by_family_and_chat_template(
    tmp_path: Path, family: str, template: str, expected: tuple[str | None, str | None]
) -> None:
    shape: ModelShape = read_shape(model_folder(tmp_path / "m", model_type=family, template=template))
    assert tuple(parsers_of(shape)) == expected


def test_vllm_has_every_parser_that_we_name() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None

    def names(folder: str) -> set[str]:
        text = (Path(str(spec.origin)).parent / folder / "__init__.py").read_text()
        return set(re.findall(r'^    "([\w-]+)": \(', text, re.MULTILINE))

    tools, thoughts = names("tool_parsers"), names("reasoning")
    assert {each.tool_calls for each in FAMILIES.values()} - {None} <= tools
    assert {each.reasoning for each in FAMILIES.values()} - {None} <= thoughts


def test_the_dialogue_asks_again_after_a_wrong_folder(tmp_path: Path) -> None:
    """As on a terminal: who mistypes a folder does not begin anew."""
    folder = model_folder(tmp_path / "m", weights=1_000_000, hidden_size=64, vocab_size=300)
    file = tmp_path / "x.yaml"
    command = [sys.executable, "-c", "from tuneloop.cli.main import main; main()", "init", str(file)]
    command += ["--gpus", "0", "--where", str(tmp_path / "data")]
    ours, theirs = os.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as terminal:
        process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        os.close(theirs)
        terminal.write(f"{tmp_path / 'typo'}\n{folder}\n".encode())
        out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert f"{tmp_path / 'typo'} is not there" in error
    assert error.count("Model: its folder, or its name on the Hub") == 2
    assert f"tuneloop keys create {file} --name me" in out
    assert yaml.safe_load(file.read_text())["buffer"]["commit"] == "auto"


def test_gpus_of_a_machine_without_any_are_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    folder = model_folder(tmp_path / "m", weights=1_000_000, hidden_size=64, vocab_size=300)
    code, _, error = tuneloop("init", tmp_path / "x.yaml", "--model", folder, "--gpus", 1, "--where", tmp_path)
    assert code == 3
    assert "nvidia-smi shows no GPU here; give --gpus 0" in error
