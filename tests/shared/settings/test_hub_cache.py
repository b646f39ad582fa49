"""Models by their names on Hugging Face's Hub: found in its local cache, or answered with what downloads them."""

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.setup.test_setup import model_folder
from tests.cli.test_main import tuneloop
from tests.doubles.engine import engine_place
from tests.explorer.running import explorer_running, settings_for
from tests.explorer.test_main import ended
from tuneloop.explorer.__main__ import check_model
from tuneloop.shared.errors import SettingsError
from tuneloop.shared.settings.base_model import require_folders
from tuneloop.shared.settings.hub_cache import cached_folder
from tuneloop.shared.settings.loader import load_settings, read_settings

NAME = "Qwen/Qwen3-0.6B"
DOWNLOAD = f"hf download {NAME}"


def put_into_cache(hub: Path, name: str = NAME, shards: tuple[str, ...] = (), missing: str = "") -> Path:
    repository, commit = hub / f"models--{name.replace('/', '--')}", "c1899de289a04d12100db370d81485cdf75e47ca"
    blobs, snapshot = model_folder(repository / "blobs"), repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    if shards:
        (blobs / "model.safetensors").rename(blobs / shards[0])
        (blobs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(shards))}))
        for each in shards[1:]:
            (blobs / each).write_bytes((blobs / shards[0]).read_bytes())
    for file in blobs.iterdir():
        if file.name != missing:
            (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    return snapshot


def settings_file(folder: Path, name: str = NAME, **but: object) -> Path:
    file = folder / "x.yaml"
    file.write_text(yaml.safe_dump({"model": {"model_path": name}, "checkpoint_root_dir": str(folder / "c"), **but}))
    return file


def test_the_snapshot_in_the_cache_is_the_model_for_all_who_read_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = put_into_cache(tmp_path / "hub")
    put_into_cache(tmp_path / "hub", "org/teacher")
    distill = {"algorithm_type": "distill", "distill": {"teacher_path": "org/teacher"}}
    settings = load_settings(settings_file(tmp_path, algorithm=distill))
    assert settings.model.model_path == snapshot
    assert settings.served_model_name == NAME, "what clients send is the name as it was written"
    assert "models--org--teacher" in str(settings.algorithm.distill.teacher_path)
    require_folders(settings)
    check_model(settings)
    renamed = settings_file(tmp_path, model={"model_path": NAME, "served_model_name": "mine"})
    assert load_settings(renamed).served_model_name == "mine"


@pytest.mark.parametrize(
    ("variables", "hub"),
    [
        ({"HF_HUB_CACHE": "{}/a", "HF_HOME": "{}/b"}, "a"),
        ({"HUGGINGFACE_HUB_CACHE": "{}/a", "HF_HOME": "{}/b"}, "a"),
        ({"HF_HOME": "{}/b", "XDG_CACHE_HOME": "{}/x"}, "b/hub"),
        ({"HF_HOME": "$ROOT/b", "XDG_CACHE_HOME": "{}/x"}, "b/hub"),
        ({"XDG_CACHE_HOME": "{}/x"}, "x/huggingface/hub"),
        ({}, "home/.cache/huggingface/hub"),
    ],
    ids=str,
)
def test_the_cache_is_where_huggingface_hub_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], hub: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROOT", str(tmp_path))
    snapshot = put_into_cache(tmp_path / hub)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    assert cached_folder(Path(NAME)) == snapshot


def test_a_folder_of_that_name_goes_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    put_into_cache(tmp_path / "hub")
    assert cached_folder(Path(NAME)) != Path(NAME)
    Path(NAME).mkdir(parents=True)
    assert cached_folder(Path(NAME)) == Path(NAME)
    for name in ("/models/Qwen3", "../Qwen3", "a/b/c", ".hidden/model", "~/model"):
        assert cached_folder(Path(name)) == Path(name)


@pytest.mark.parametrize("missing", ["config.json", "b.safetensors", "refs"])
def test_a_download_that_was_interrupted_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshot = put_into_cache(tmp_path / "hub", shards=("a.safetensors", "b.safetensors"), missing=missing)
    if missing == "refs":
        (snapshot.parent.parent / "refs" / "main").unlink()
    assert cached_folder(Path(NAME)) == Path(NAME)


def test_without_a_download_each_command_says_how_to_get_it(tmp_path: Path) -> None:
    file, cache = settings_file(tmp_path), {"HF_HOME": str(tmp_path)}
    valid = tuneloop("validate", file, **cache)
    assert (valid.code, DOWNLOAD in valid.output) == (0, True)
    assert any(DOWNLOAD in note for note in json.loads(tuneloop("validate", file, "--json", **cache).output)["notes"])
    plan = tuneloop("plan", file, **cache)
    init = tuneloop("init", tmp_path / "new.yaml", "--model", NAME, "--gpus", "0", "--where", tmp_path, **cache)
    for refused in (plan, init):
        assert refused.code == 3
        assert refused.errors.rstrip().endswith(DOWNLOAD)
    assert not (tmp_path / "new.yaml").exists()


def test_services_refuse_for_good_what_was_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    attached = {"rollout_model": {"engine_urls": ["http://127.0.0.1:9"]}}
    file = settings_file(tmp_path, mode="serve", explorer=attached)
    code, sentence = ended(file)
    assert (code, sentence.endswith(DOWNLOAD)) == (2, True), "code 2: not to be started again"
    with pytest.raises(SettingsError, match=DOWNLOAD):
        require_folders(read_settings(file).valid_settings())
    teacher = {"algorithm_type": "distill", "distill": {"teacher_path": NAME}}
    put_into_cache(tmp_path / "hub", "org/student")
    with pytest.raises(SettingsError, match=rf"^algorithm\.distill\.teacher_path: .*{DOWNLOAD}"):
        require_folders(load_settings(settings_file(tmp_path, "org/student", algorithm=teacher)))


def test_init_writes_the_name_and_plans_with_the_snapshot(tmp_path: Path) -> None:
    put_into_cache(tmp_path / "hub")
    file, cache = tmp_path / "new.yaml", {"HF_HOME": str(tmp_path)}
    made = tuneloop("init", file, "--model", NAME, "--gpus", "1", "--gpu-memory", "80", "--where", tmp_path, **cache)
    assert made.code == 0, made.errors
    assert yaml.safe_load(file.read_text())["model"]["model_path"] == NAME
    planned = json.loads(tuneloop("plan", file, "--gpu-memory", "80", "--json", **cache).output)
    assert planned["model"]["weights"] == 596_049_920


def test_a_service_tells_the_name_of_the_model_not_of_its_snapshot(tmp_path: Path) -> None:
    """`tune()` compares it with the model that it was told of."""
    settings = settings_for(tmp_path)
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899d"
    snapshot.parent.mkdir(parents=True)
    settings.model.model_path.rename(snapshot)
    model = settings.model.model_copy(update={"model_path": snapshot})
    with engine_place() as place:
        rollout = settings.explorer.rollout_model.model_copy(update={"engine_urls": (place.fresh().url,)})
        explorer = settings.explorer.model_copy(update={"rollout_model": rollout})
        with explorer_running(settings.model_copy(update={"model": model, "explorer": explorer})) as running:
            assert running.http.get("/training").json()["configured"]["model"] == "Qwen3-0.6B"
