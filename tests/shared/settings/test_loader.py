import logging
from pathlib import Path

import pytest

from tuneloop.shared.settings.loader import SettingsReport, load_settings, read_settings

TRINITY = Path(__file__).parents[2] / "fixtures" / "trinity"
MODEL = "model: {model_path: some/model}\n"


def report(folder: Path, text: str, *overrides: str, **environment: str) -> SettingsReport:
    file = folder / "x.yaml"
    file.write_text(text)
    return read_settings(file, overrides, environment)


def problems(folder: Path, text: str, *overrides: str, **environment: str) -> list[str]:
    return [each.removeprefix(f"{folder}/") for each in report(folder, text, *overrides, **environment).problems]


def test_trinitys_explorer_file_means_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_settings(TRINITY / "explorer.yaml")
    rollout = settings.explorer.rollout_model
    assert (settings.mode, settings.project, settings.name) == ("serve", "test", "test")
    assert settings.checkpoint_root_dir == tmp_path / "CHECKPOINT_ROOT_DIR"
    assert settings.served_model_name == "/path/to/your/model"
    assert (settings.model.max_model_len, settings.model.max_response_tokens) == (8192, 2048)
    assert settings.model.temperature == 0.7
    assert (rollout.engine_num, rollout.tensor_parallel_size, rollout.seed) == (2, 2, 42)
    assert (rollout.enable_auto_tool_choice, rollout.tool_call_parser) == (True, "hermes")
    assert (settings.explorer.service_status_check_interval, settings.explorer.proxy_port) == (10, 8010)
    assert settings.buffer.trainer_input.experience_buffer.name == "exp_buffer"


def test_trinitys_trainer_file_means_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_settings(TRINITY / "trainer.yaml")
    assert settings.mode == "train"
    assert settings.buffer.train_batch_size == 32
    assert (settings.trainer.save_interval, settings.trainer.keep_interval) == (1, 16)
    assert settings.database_url == f"sqlite:///{tmp_path}/CHECKPOINT_ROOT_DIR/test/test/buffer/exp_buffer.db"


def test_keys_without_effect_are_named_in_one_warning(caplog):
    with caplog.at_level(logging.WARNING):
        load_settings(TRINITY / "trainer.yaml")
    assert [each.message for each in caplog.records] == [
        "settings ignored: buffer.trainer_input.experience_buffer.storage_type, "
        "trainer.save_hf_checkpoint, trainer.trainer_config"
    ]


@pytest.mark.parametrize("written", ["0640", '"0640"'])
def test_rights_are_meant_as_they_are_written(tmp_path, written):
    file = tmp_path / "x.yaml"
    file.write_text(f"{MODEL}trainer: {{checkpoint_mode: {written}}}\n")
    assert load_settings(file).trainer.checkpoint_mode == "0640"
    assert load_settings(file, ["trainer.checkpoint_mode=0660"]).trainer.checkpoint_mode == "0660"


@pytest.mark.parametrize("written", ["640", "0666", "true", "group"])
def test_rights_that_are_none_are_refused(tmp_path, written):
    [problem] = problems(tmp_path, f"{MODEL}trainer: {{checkpoint_mode: {written}}}\n")
    assert "trainer.checkpoint_mode" in problem


def test_keys_that_only_trinity_knows_are_accepted_and_named(tmp_path):
    text = (
        MODEL
        + "group: g\ntrainer: {critic_warmup: 3}\nstages: [{stage_name: one}]\nservice: {data_juicer: {port: 1}}\n"
    )
    found = report(tmp_path, text)
    assert found.settings is not None
    assert found.warning == "settings ignored: group, service, stages, trainer.critic_warmup"


def test_every_mistake_is_told_at_once_with_its_place(tmp_path):
    text = (
        "mode: srve\n"
        "model:\n"
        "  model_pth: x\n"
        "  max_model_len: many\n"
        "explorer:\n"
        "  proxy_port: 99999\n"
        "  rollout_model: {engine_num: 0}\n"
    )
    assert problems(tmp_path, text) == [
        "x.yaml:1:1: mode: must be 'serve', 'train' or 'both', not 'srve'. Did you mean 'serve'?",
        "x.yaml:2:1: model.model_path: is required and missing",
        "x.yaml:3:3: model.model_pth: unknown key. Did you mean 'model_path'?",
        "x.yaml:4:3: model.max_model_len: must be a whole number, not 'many'",
        "x.yaml:6:3: explorer.proxy_port: must be less than or equal to 65535, not 99999",
        "x.yaml:7:19: explorer.rollout_model.engine_num: must be greater than 0, not 0",
    ]


def test_an_empty_section_has_its_defaults(tmp_path):
    assert report(tmp_path, MODEL + "explorer:\ntrainer:\n").settings == report(tmp_path, MODEL).settings


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("project: 2024\n", "1:1: project: must be text, not 2024. Write it in quotes"),
        ("name: a/b\n", "1:1: name: must be one folder name, without '/', not 'a/b'"),
        ("buffer: 3\n", "1:1: buffer: must be a section (`key: value` lines), not 3"),
        ("explorer: {proxy_port: true}\n", "1:12: explorer.proxy_port: must be a number, not True"),
        ("trainer: {poll_interval: .inf}\n", "1:11: trainer.poll_interval: must be a finite number, not inf"),
        ("algorithm: {gamma: .nan}\n", "1:13: algorithm.gamma: must be a finite number, not nan"),
        ("trainer: {seed: 1.5}\n", "1:11: trainer.seed: must be a whole number, not 1.5"),
        (
            "trainer: {device: gpu}\n",
            "1:11: trainer.device: must be 'auto', 'cpu' or 'cuda', not 'gpu'. Did you mean 'cpu'?",
        ),
        ("proxy_port: 3\n", "1:1: proxy_port: unknown key. Did you mean 'explorer.proxy_port'?"),
        ("zzz: 3\n", "1:1: zzz: unknown key."),
        (
            "feedback: {quarantine_below: 0.5}\n",
            "feedback.quarantine_below: removed: raters are not compared any more. Delete the line;",
        ),
        (
            "explorer: {spool_dir: /x}\n",
            "explorer.spool_dir: removed: use explorer.outbox_dir, a folder of its own",
        ),
        ("explorer: {spool_max_bytes: 9}\n", "explorer.spool_max_bytes: removed: use explorer.outbox_max_bytes"),
        ("explorer: {durability: write}\n", "explorer.durability: removed: it is always 'fsync'. Delete the line"),
        (
            "monitor: {drift: {reward_rise: 0.1}}\n",
            "1:19: monitor.drift.reward_rise: removed: it is always 0.05. Delete the line",
        ),
        ("gate: {replay: {share: 0.1}}\n", "1:8: gate.replay: removed: a candidate is compared on the tasks of"),
        (
            "algorithm: {optimizer: {betas: [0.9, two]}}\n",
            "1:38: algorithm.optimizer.betas[1]: must be a number, not 'two'",
        ),
        (
            "algorithm: {optimizer: {betas: [0.9, 1.0]}}\n",
            "1:38: algorithm.optimizer.betas[1]: must be less than 1, not 1.0",
        ),
        (
            "algorithm: {optimizer: {betas: [-0.1, 0.9]}}\n",
            "1:33: algorithm.optimizer.betas[0]: must be greater than or equal to 0, not -0.1",
        ),
        (
            "explorer: {rollout_model: {engine_urls: http://x}}\n",
            "1:28: explorer.rollout_model.engine_urls: must be a list, such as [a, b], not 'http://x'",
        ),
        (
            "buffer: {trainer_input: {experience_buffer: {path: 'mysql://u:secret@h/d'}}}\n",
            "1:46: buffer.trainer_input.experience_buffer.path: mysql is not supported; use sqlite or postgresql",
        ),
        (
            "explorer: {rollout_model: {engine_key: 12345}}\n",
            "explorer.rollout_model.engine_key: must be text, not the value given. Write it in quotes",
        ),
        (
            "checkpoint_root_dir: 3\n",
            "1:1: checkpoint_root_dir: must be a path, not 3",
        ),
    ],
)
def test_a_wrong_value_is_told_with_what_is_right(tmp_path, text, told):
    (found,) = problems(tmp_path, text + MODEL)
    assert told in found
    assert "secret" not in found


@pytest.mark.contract
@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("explorer.wait_timeout", "it is always 60.0. Delete the line"),
        ("algorithm.critic_optimizer.weight_decay", "it is always 0.0. Delete the line"),
        ("buffer.fair_share", "it is always true. Delete the line"),
        ("gate.kl", "scores, lengths and refusals are compared. Delete the line"),
    ],
)
def test_an_option_that_there_was_is_told_wherever_it_is_written(tmp_path, option, told):
    variable = "TUNELOOP__" + option.upper().replace(".", "__")
    *_, in_the_environment = report(tmp_path, MODEL, **{variable: "1"}).problems
    assert in_the_environment == f"{variable}: {option}: removed: {told}"
    *_, as_a_flag = report(tmp_path, MODEL, f"{option}=1").problems
    assert as_a_flag == f"--set {option}: {option}: removed: {told}"


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("mode: explore\n", "Write 'serve' if that file has `mode: train`"),
        ("mode: bench\n", "there is no 'bench' here. Name tasks with known answers in monitor.evaluation.path"),
        ("mode: colocate\n", "'colocate' is 'both' with explorer.rollout_model.gpu_memory_utilization: 0.4"),
        ("algorithm: {algorithm_type: sapo}\n", "there is none here; the nearest is gspo"),
        ("monitor: {monitor_type: swanlab}\n", "write 'tensorboard'"),
        ("cluster: {node_num: 0}\n", "write the number of machines"),
        ("trainer: {save_interval: 0}\n", "write after how many steps to publish"),
        ("trainer: {seed: '${oc.env:X}'}\n", "trainer.seed: ${oc.env:X}: there is no environment variable X"),
        ("actor_rollout_ref: {}\n", "this is veRL's format"),
    ],
)
def test_a_value_of_trinitys_that_we_lack_is_told_with_what_to_write(tmp_path, text, instead):
    assert instead in problems(tmp_path, text + MODEL)[0]


def test_engines_that_do_not_fit_the_cluster_are_refused(tmp_path):
    engines = "explorer:\n  rollout_model: {engine_num: 3, tensor_parallel_size: 2}\n"
    text = MODEL + "mode: serve\ncluster: {gpu_per_node: 4}\n" + engines
    assert problems(tmp_path, text) == [
        "x.yaml:5:19: explorer.rollout_model.engine_num: 3 engines of 2 GPUs need 6, this machine has 4 (mode: serve); "
        "an engine has all of its GPUs on one machine. Lower engine_num or tensor_parallel_size, raise "
        "cluster.gpu_per_node or cluster.node_num, or name engines elsewhere in engine_urls"
    ]


def test_an_engine_must_leave_room_for_a_trainer_on_the_same_gpu(tmp_path):
    text = MODEL + "cluster: {gpu_per_node: 1}\n"
    (found,) = problems(tmp_path, text)
    assert "explorer.rollout_model.gpu_memory_utilization: 0.9 leaves the trainer too little" in found
    assert "Write 0.4" in found


@pytest.mark.parametrize("url", ["gpu-box:8000", "localhost", "ftp://gpu-box", "http://", "http://gpu-box:port", "''"])
def test_an_engine_elsewhere_is_named_by_an_absolute_url(tmp_path, url):
    (found,) = problems(tmp_path, MODEL + f"explorer: {{rollout_model: {{engine_urls: [{url!r}]}}}}\n")
    assert "explorer.rollout_model.engine_urls[0]: must be an absolute URL, such as http://host:port, not " in found


def test_tool_choice_needs_a_parser(tmp_path):
    text = MODEL + "explorer: {rollout_model: {enable_auto_tool_choice: true}}\n"
    (found,) = problems(tmp_path, text)
    assert "enable_auto_tool_choice: needs explorer.rollout_model.tool_call_parser" in found


def test_contradictions_are_told_along_with_plain_mistakes(tmp_path):
    text = "model: {model_path: x, max_model_len: 5, max_response_tokens: 10}\ntrainer: {seed: x}\nbatch: 3\n"
    assert [each.split(": ")[1] for each in problems(tmp_path, text)] == [
        "model.max_response_tokens",
        "trainer.seed",
        "batch",
    ]


def test_a_contradiction_that_rests_on_a_mistake_is_not_told(tmp_path):
    text = MODEL + "cluster: {gpu_per_node: one}\nexplorer: {rollout_model: {engine_num: 2}}\n"
    assert [each.split(": ")[1] for each in problems(tmp_path, text)] == ["cluster.gpu_per_node"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "1:1: the file is empty; at least model.model_path is needed"),
        ("# nothing\n", "1:1: the file is empty; at least model.model_path is needed"),
        ("- a\n", "1:1: the file must be a mapping: `key: value` lines"),
        ("a: [1\nb: 2\n", "2:2: not YAML: while parsing a flow sequence, expected ',' or ']', but got ':'"),
        ("a: 1\n---\nb: 1\n", "2:1: not YAML: expected a single document in the stream, but found another document"),
        ("a: \x01\n", "1:1: not YAML: special characters are not allowed"),
        ("name: !!python/name:os.system\n" + MODEL, "1:7: not YAML: could not determine a constructor"),
        ("name: 2024-13-45\n" + MODEL, "1:1: a value is no date or number, though it looks like one"),
        ("1: x\n" + MODEL, "1:1: a key must be text; write it in quotes"),
        ("<<: 3\n" + MODEL, "1:5: not YAML: while constructing a mapping, expected a mapping or list"),
        ("[" * 3000, "1:1: nested too deeply"),
    ],
)
def test_what_is_wrong_with_the_yaml_itself_is_told_with_its_place(tmp_path, text, told):
    assert problems(tmp_path, text)[0].startswith(f"x.yaml:{told}")


def test_a_key_written_twice_is_a_mistake(tmp_path):
    text = MODEL + "trainer:\n  seed: 1\n  seed: 2\n"
    assert problems(tmp_path, text) == ["x.yaml:4:3: trainer.seed: written twice, first in line 3"]


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    assert read_settings(tmp_path / "none.yaml").problems == (
        f"{tmp_path}/none.yaml: cannot be read: No such file or directory",
    )
    assert read_settings(tmp_path).problems == (f"{tmp_path}: cannot be read: Is a directory",)


def test_anchors_and_merges_work(tmp_path):
    text = MODEL + "algorithm:\n  optimizer: &o {lr: 1e-3}\n  critic_optimizer: {<<: *o}\n"
    settings = report(tmp_path, text).settings
    assert settings is not None
    assert settings.algorithm.critic_optimizer.lr == settings.algorithm.optimizer.lr == 1e-3


def test_a_number_like_1e_6_is_a_number(tmp_path):
    settings = report(tmp_path, MODEL + "algorithm: {optimizer: {lr: 5e-6}}\n").settings
    assert settings is not None
    assert settings.algorithm.optimizer.lr == 5e-6


def test_an_environment_variable_wins_over_the_file(tmp_path):
    text = MODEL + "explorer: {proxy_port: 1}\n"
    settings = report(tmp_path, text, TUNELOOP__EXPLORER__PROXY_PORT="9000", TUNELOOPX="3").settings
    assert settings is not None
    assert settings.explorer.proxy_port == 9000


def test_the_processs_environment_is_read(tmp_path, monkeypatch):
    (tmp_path / "x.yaml").write_text("mode: both\n")
    monkeypatch.setenv("TUNELOOP__MODEL__MODEL_PATH", "a/b")
    assert load_settings(tmp_path / "x.yaml").model.model_path == Path("a/b")


def test_a_set_flag_wins_over_the_environment(tmp_path):
    settings = report(tmp_path, MODEL, "explorer.proxy_port=7", TUNELOOP__EXPLORER__PROXY_PORT="9000").settings
    assert settings is not None
    assert settings.explorer.proxy_port == 7


def test_overrides_take_text_numbers_truth_lists_and_null(tmp_path):
    settings = report(
        tmp_path,
        MODEL,
        "name=123",
        "trainer.poll_interval=0.5",
        "algorithm.off_policy.correction=mask",
        "explorer.rollout_model.engine_urls=[http://a:1, http://b:2]",
        "algorithm.dual_clip=null",
        "buffer.trainer_input.experience_buffer.path=sqlite:////a/b.db?x=y",
    ).settings
    assert settings is not None
    assert (settings.name, settings.trainer.poll_interval) == ("123", 0.5)
    assert (settings.algorithm.off_policy.correction, settings.algorithm.dual_clip) == ("mask", None)
    assert settings.explorer.rollout_model.engine_urls == ("http://a:1", "http://b:2")
    assert settings.database_url == "sqlite:////a/b.db?x=y"


def test_problems_in_overrides_name_the_variable_or_the_flag(tmp_path):
    assert problems(
        tmp_path,
        MODEL,
        "proxy",
        "explorer.proxy_port=x",
        "mode.x=1",
        "explorer.rollout_model.engine_args=[a",
        TUNELOOP__EXPLORER__PROXI_PORT="9000",
    ) == [
        "TUNELOOP__EXPLORER__PROXI_PORT: explorer.proxi_port: unknown key. Did you mean 'proxy_port'?",
        "--set explorer.proxy_port: explorer.proxy_port: must be a whole number, not 'x'",
        "--set explorer.rollout_model.engine_args: explorer.rollout_model.engine_args: not a value: [a",
        "--set mode.x: mode: must be 'serve', 'train' or 'both', not {'x': '1'}",
        "--set proxy: write it as --set key=value",
    ]
