import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.doubles.warm.commands import run_tuneloop
from tests.doubles.warm.process import WarmProcess
from tuneloop.shared import VERSION
from tuneloop.shared.ledger.storage.revisions import newest
from tuneloop.shared.settings.hardware import count_gpus

TRINITY = Path(__file__).parent.parent / "fixtures" / "trinity"


def settings_file(folder: Path, text: str = "") -> Path:
    file = folder / "x.yaml"
    file.write_text(f"checkpoint_root_dir: {folder}/checkpoints\nmodel: {{model_path: some/model}}\n{text}")
    return file


def environment_of(more: dict[str, str]) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": "", "LANG": os.environ.get("LANG", ""), "COLUMNS": "200", **more}


def start(*arguments: object, path: Path | None = None, cwd: Path | None = None, **environment: str):
    command = [sys.executable, "-P", "-c", "from tuneloop.cli.main import main; main()", *map(str, arguments)]
    ours = os.environ.get("PYTHONPATH", "")  # of a checkout that is not the one installed
    variables = environment_of({"PYTHONPATH": os.pathsep.join(filter(None, (str(path or ""), ours))), **environment})
    pipe = subprocess.PIPE
    return WarmProcess(command, env=variables, cwd=cwd, stdout=pipe, stderr=pipe, text=True)


def tuneloop(*arguments: object, path: Path | None = None, cwd: Path | None = None, **environment: str):
    """The exit code, the output, and the errors of a command. Only with a `path` it takes a Python of its own."""
    if path is None:
        return run_tuneloop(*arguments, cwd=cwd, environment=environment_of(environment))
    process = start(*arguments, path=path, cwd=cwd, **environment)
    out, error = process.communicate(timeout=60)
    return process.returncode, out, error


def pids(process: subprocess.Popen[str]) -> dict[str, int]:
    """Read until both services have said who they are."""
    found: dict[str, int] = {}
    while len(found) < 2:
        name, _, word = process.stdout.readline().strip().partition(" ")
        if word.isdigit():
            found[name] = int(word)
    return found


def ended(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if status.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_the_version_is_told():
    assert tuneloop("--version") == (0, f"tuneloop {VERSION}\n", "")


def test_validate_says_what_it_understood_of_an_explorer(tmp_path):
    own = ["--set", "model.model_path=/models/own", "--set", "checkpoint_root_dir=checkpoints"]
    code, out, error = tuneloop("validate", TRINITY / "explorer.yaml", *own, cwd=tmp_path)
    lines = {line[2:20].strip(): line[21:] for line in out.splitlines()[1:]}
    assert (code, error) == (0, "")
    assert ("there is no GPU here: all runs on the CPU" in lines.pop("note", "")) is (count_gpus() == 0)
    assert lines == {
        "mode": "serve",
        "job folder": f"{tmp_path}/checkpoints/test/test",
        "database": f"sqlite:///{tmp_path}/checkpoints/test/test/buffer/exp_buffer.db",
        "model": "/models/own, 8192 tokens",
        "served as": "/models/own",
        "listens on": "127.0.0.1:8010",
        "engines": "2 x 2 GPU of 4",
        "GPUs": "GPU 0: engine 0, GPU 1: engine 0, GPU 2: engine 1, GPU 3: engine 1",
        "new versions": "looked for every 10 s",
        "ignored": "buffer.trainer_input.experience_buffer.storage_type, explorer.rollout_model.enable_history, "
        "explorer.rollout_model.enable_openai_api",
    }


def test_validate_refuses_the_placeholders_of_an_example(tmp_path):
    code, out, error = tuneloop("validate", TRINITY / "trainer.yaml", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert "model.model_path: /path/to/your/model stands in an example for a folder of yours; write its path" in error
    assert f"checkpoint_root_dir: {tmp_path}/CHECKPOINT_ROOT_DIR stands in an example" in error
    told = json.loads(tuneloop("validate", TRINITY / "trainer.yaml", "--json", cwd=tmp_path)[1])
    assert (told["valid"], len(told["problems"])) == (False, 2)
    for folder in ("models/own", "your/model"):  # whose name is odd, and is there
        (tmp_path / folder).mkdir(parents=True)
        own = ["--set", f"model.model_path={tmp_path / folder}", "--set", "checkpoint_root_dir=checkpoints"]
        assert tuneloop("validate", TRINITY / "trainer.yaml", *own, cwd=tmp_path)[0] == 0


def test_validate_says_what_it_understood_of_a_trainer(tmp_path):
    file = settings_file(tmp_path, "mode: train\ngroup: g\ntrainer: {save_interval: 4}\n")
    _, out, _ = tuneloop("validate", file, "--set", "buffer.train_batch_size=7")
    lines = {line[2:20].strip(): line[21:] for line in out.splitlines()[1:]}
    assert (lines["step"], lines["publishes"]) == ("7 experiences, ppo", "a version every 4 step(s), keeps 5")
    assert lines["ignored"] == "group"
    assert "engines" not in lines


def test_validate_says_what_engines_of_others_cost_without_our_plugin(tmp_path):
    file = settings_file(tmp_path, "explorer: {rollout_model: {engine_urls: ['http://gpu-box:8000']}}\n")
    notes = [line[21:] for line in tuneloop("validate", file)[1].splitlines() if line.startswith("  note")]
    [note] = [each for each in notes if "hf download" not in each]
    for said in ("is not started by tuneloop", "28 to 51 %", "pip install --no-deps .", "PACKS=1", "doctor"):
        assert said in note
    assert tuneloop("validate", file, "--json")[1].count("28 to 51 %") == 1
    assert "28 to 51" not in tuneloop("validate", file, "--set", "mode=train")[1]


@pytest.mark.contract
def test_validate_says_that_the_value_of_edited_answers_was_removed(tmp_path):
    file = settings_file(tmp_path, "reward:\n  demonstration_value: 1.0\n")
    code, _, err = tuneloop("validate", file)
    assert code == 2
    assert "reward.demonstration_value: removed: sft learns edited answers" in err
    assert "Delete the line" in err


def test_validate_tells_every_mistake_and_ends_with_2(tmp_path):
    file = settings_file(tmp_path, "mode: srve\nnmae: x\n")
    code, out, error = tuneloop("validate", file)
    assert (code, out) == (2, "")
    assert error.splitlines() == [
        f"{file}:3:1: mode: must be 'serve', 'train' or 'both', not 'srve'. Did you mean 'serve'?",
        f"{file}:4:1: nmae: unknown key. Did you mean 'name'?",
    ]


@pytest.mark.parametrize(("mode", "service"), [("serve", "explorer"), ("train", "trainer")])
def test_run_becomes_the_service_of_its_mode(tmp_path, services, mode, service):
    file = settings_file(tmp_path, f"mode: {mode}\n")
    process = start("run", "-c", file, "--set", "name=n", "--set", "project=p", path=services)
    said = json.loads(process.stdout.readline().removeprefix(f"{service} "))
    assert said == ["--config", str(file), "--set", "name=n", "--set", "project=p"]
    assert process.stdout.readline() == f"{service} {process.pid}\n"
    process.terminate()
    assert process.communicate(timeout=10)[0] == f"{service} SIGTERM\n"
    assert process.returncode == 0


def test_run_with_mistakes_starts_nothing(tmp_path, services):
    code, out, error = tuneloop("run", "-c", settings_file(tmp_path), "--set", "mode=x", path=services)
    assert (code, out) == (2, "")
    assert error == "--set mode: mode: must be 'serve', 'train' or 'both', not 'x'\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_both_passes_a_signal_on_and_ends_with_0(tmp_path, services, number):
    process = start("run", "-c", settings_file(tmp_path), path=services)
    pids(process)
    process.send_signal(number)
    out, error = process.communicate(timeout=10)
    assert sorted(out.splitlines()) == [f"explorer {number.name}", f"trainer {number.name}"]
    waits = "waits for the explorer (replies in flight, 30 s at most) and the trainer (its step)"
    assert error == (f"tuneloop run: stopping; {waits}\n" if number == signal.SIGINT else "")
    assert process.returncode == 0


def starts_of(process: subprocess.Popen[str], name: str, count: int) -> list[float]:
    """When so many starts of the service were told of, by the monotonic clock."""
    found: list[float] = []
    while len(found) < count:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        who, _, word = line.strip().partition(" ")
        if who == name and word.isdigit():
            found.append(time.monotonic())
    return found


@pytest.mark.parametrize(
    ("name", "other", "does"),
    [("trainer", "explorer", "3"), ("explorer", "trainer", "7"), ("trainer", "explorer", "die")],
)
def test_run_both_starts_a_service_that_fails_again_and_the_other_goes_on(tmp_path, services, name, other, does):
    process = start("run", "-c", settings_file(tmp_path), path=services, **{f"{name.upper()}_DOES": does})
    running = pids(process)[other]
    first, second, third = starts_of(process, name, 3)
    assert third - second > second - first, "the pauses grow"
    assert Path(f"/proc/{running}").exists()
    process.terminate()
    out, error = process.communicate(timeout=10)
    assert f"{other} SIGTERM" in out.splitlines()
    code = 128 + signal.SIGKILL if does == "die" else int(does)
    assert f"tuneloop run: the {name} has ended with code {code}; it is started again in 1 s" in error.splitlines()
    assert process.returncode in {0, code}, "it may be just failing again"


@pytest.mark.parametrize("does", ["0", "2", "4"])
def test_run_both_serves_on_when_starting_the_trainer_again_would_cure_nothing(tmp_path, services, does):
    process = start("run", "-c", settings_file(tmp_path), path=services, TRAINER_DOES=does)
    found = pids(process)
    assert ended(found["trainer"])
    time.sleep(1.5)
    assert Path(f"/proc/{found['explorer']}").exists()
    process.terminate()
    out, error = process.communicate(timeout=10)
    told = f"tuneloop run: the trainer has ended with code {does}, which starting again does not cure\n"
    assert error == ("" if does == "0" else told)
    assert out.count("trainer") == 0
    assert process.returncode == int(does)


def test_run_both_ends_when_neither_gets_through_its_first_start(tmp_path, services):
    code, out, _ = tuneloop("run", "-c", settings_file(tmp_path), path=services, EXPLORER_DOES="3", TRAINER_DOES="3")
    assert code == 3
    assert out.count("trainer [") <= 2


def test_the_services_die_with_a_supervisor_that_is_killed(tmp_path, services):
    process = start("run", "-c", settings_file(tmp_path), path=services)
    children = pids(process)
    process.kill()
    process.communicate(timeout=10)
    assert all(ended(pid) for pid in children.values())


def test_a_folder_named_as_a_service_where_we_are_started_is_not_run(tmp_path, services):
    (tmp_path / "explorer").mkdir()
    (tmp_path / "explorer" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    file = settings_file(tmp_path, "mode: serve\n")
    code, _, error = tuneloop("run", "-c", file, path=services, cwd=tmp_path, EXPLORER_DOES="0")
    assert (code, error) == (0, "")


def test_the_database_is_brought_up_to_date_once_asked(tmp_path):
    file = settings_file(tmp_path)
    assert tuneloop("db", "current", "-c", file) == (0, f"empty (newest: {newest()})\n", "")
    assert not (tmp_path / "checkpoints").exists()
    assert tuneloop("db", "upgrade", "--config", file) == (0, f"{newest()} (newest: {newest()})\n", "")
    assert tuneloop("db", "current", "-c", file) == (0, f"{newest()} (newest: {newest()})\n", "")


def test_a_database_out_of_reach_is_a_sentence_without_its_password(tmp_path):
    flag = "buffer.trainer_input.experience_buffer.path=postgresql://u:secret@localhost:1/d?password=secret"
    code, out, error = tuneloop("db", "current", "-c", settings_file(tmp_path), "--set", flag)
    assert (code, out) == (3, "")
    assert error.startswith("cannot use the database postgresql+psycopg://u:***@localhost:1/d: ")
    assert error.count("\n") == 1
    assert "secret" not in error


def test_the_resolved_settings_are_shown_without_secrets_and_load_again(tmp_path):
    file = settings_file(tmp_path)
    url = "buffer.trainer_input.experience_buffer.path=postgresql://u:secret@h/d"
    _, out, _ = tuneloop(
        "config",
        "show",
        "-c",
        file,
        "--set",
        url,
        "--set",
        "explorer.rollout_model.engine_key=secret",
        "--set",
        "explorer.admin_key=secret-of-an-admin",
        "--set",
        "judge.key=secret",
        "--set",
        "name=n",
    )
    values = yaml.safe_load(out)
    assert (values["name"], values["trainer"]["seed"]) == ("n", 42)
    assert values["explorer"]["rollout_model"]["engine_key"] == "***"
    assert "secret" not in out
    assert values["explorer"]["admin_key"] == "***"
    shown = tmp_path / "shown.yaml"
    shown.write_text(out)
    code, _, error = tuneloop("validate", shown)
    assert (code, "explorer.admin_key: must have at least 16" in error) == (2, True)  # a mask must not become a key
    shown.write_text(out.replace("admin_key: '***'", "admin_key: null"))
    assert tuneloop("validate", shown)[0] == 0
