"""What services and commands leave on disk: who may read it, and what is left of a person who was erased."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import EngineDouble
from tests.doubles.serving import serving
from tests.doubles.spelling import SpellingDouble, write_tokenizer
from tests.doubles.warm.commands import run_tuneloop
from tests.explorer.running import HELLO, eventually
from tests.explorer.test_main import service, write_settings
from tuneloop.shared.settings.loader import load_settings

MAIL = "ann@example.org"


@pytest.fixture
def double() -> Iterator[EngineDouble]:
    engine = SpellingDouble(reply="a goldfinch")
    with serving(engine) as url:
        engine.url = url
        yield engine


def commanded(*words: object) -> str:
    done = run_tuneloop(*words, umask=0o022)
    assert done.code == 0, done.errors + done.output
    return done.output


def settings_of(tmp_path: Path, double: EngineDouble, **but: Any) -> Path:
    file = write_settings(tmp_path, explorer__rollout_model__engine_urls=[double.url], **but)
    write_tokenizer(tmp_path / "model")
    return file


def holding(words: bytes, *folders: Path) -> set[str]:
    found = set()
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and words in path.read_bytes():
                found.add(path.name)
    return found


def test_nobody_else_can_read_what_services_and_commands_write(tmp_path: Path, double: EngineDouble) -> None:
    before = os.umask(0o022)
    try:
        file = settings_of(tmp_path, double)
        (tmp_path / "out").mkdir()
        with service(file) as (_, http):
            said = http.post("/v1/chat/completions", json=HELLO | {"metadata": {"a": "b"}}).json()["id"]
            http.post("/feedback", json={"msg_ids": [said], "reward": 1})
            commanded("export", "-c", file, "--format", "experiences", "--to", tmp_path / "out" / "rows.jsonl")
            commanded("export", "-c", file, "--format", "sft", "--to", tmp_path / "out" / "sft.parquet")
            commanded("backup", tmp_path / "backup", "-c", file)
            commanded("erase", "-c", file, "--user", "nobody")
        commanded("import", "-c", file, tmp_path / "out" / "rows.jsonl")
    finally:
        os.umask(before)
    job = load_settings(file, ()).job_dir
    files = [
        job,
        *job.rglob("*"),
        *(tmp_path / "out").iterdir(),
        tmp_path / "backup",
        *(tmp_path / "backup").rglob("*"),
    ]
    assert len(files) > 15
    assert {str(each): oct(each.stat().st_mode) for each in files if each.stat().st_mode & 0o077} == {}


def test_every_copy_of_an_erased_person_is_gone_and_no_name_of_theirs_is_left(
    tmp_path: Path, double: EngineDouble
) -> None:
    file = settings_of(tmp_path, double, privacy__redact=["email"], explorer__service_status_check_interval=0.2)
    settings, words, out = load_settings(file, ()), b"goldfinch of ann", tmp_path / "out"
    out.mkdir()
    with service(file) as (_, http):
        body = HELLO | {"messages": [{"role": "user", "content": words.decode()}], "user": MAIL, "metadata": {"a": "b"}}
        said = http.post("/v1/chat/completions", json=body).json()["id"]
        first = http.post("/v1/responses", json={"model": "t", "input": words.decode(), "user": MAIL}).json()["id"]
        http.post("/v1/responses", json={"model": "t", "input": "on", "user": MAIL, "previous_response_id": first})
        http.post(f"/v1/chat/completions/{said}", json={"metadata": {"note": words.decode()}})
        told = {"msg_ids": [said], "reward": 1, "comment": words.decode(), "demonstration": words.decode()}
        assert http.post("/feedback", json=told | {"source": MAIL}).status_code == 200
        assert http.post("/commit").status_code == 200
        [waiting] = holding(words, settings.outbox_dir)
        for name, format_ in {"rows.jsonl": "experiences", "sft.jsonl": "sft", "kto.parquet": "kto"}.items():
            commanded("export", "-c", file, "--format", format_, "--to", out / name)
        assert {"rows.jsonl", waiting} < holding(words, settings.job_dir, out)
        assert holding(MAIL.encode(), settings.job_dir, out) == set()
        commanded("erase", "-c", file, "--user", MAIL)
        eventually(lambda: holding(words, settings.job_dir, out) == set())
        assert holding(MAIL.encode(), settings.job_dir, out) == set()


#: A bug, in every process of the service: its error quotes what a client has sent.
_BUG = """
import orjson

loads = orjson.loads


def quote(data):
    if "please crash" in str(data):
        raise RuntimeError(f"this cannot be read: {data!r}")
    return loads(data)


orjson.loads = quote
"""


def test_an_error_that_quotes_a_client_is_redacted_and_no_core_file_is_written(
    tmp_path: Path, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bug").mkdir()
    (tmp_path / "bug" / "sitecustomize.py").write_text(_BUG)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "bug"), os.environ.get("PYTHONPATH", "")]))
    with service(settings_of(tmp_path, double, privacy__redact=["email"])) as (running, http):
        body = HELLO | {"messages": [{"role": "user", "content": f"please crash, {MAIL}"}]}
        assert http.post("/v1/chat/completions", json=body).status_code == 500
        said, stream = b"", running.stderr
        assert stream is not None
        while b"RuntimeError: this cannot be read" not in said:
            said += os.read(stream.fileno(), 1 << 16)
        assert b"[REDACTED:email]" in said
        assert MAIL.encode() not in said
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        assert children
        for pid in (running.pid, *children):
            assert "Max core file size        0 " in Path(f"/proc/{pid}/limits").read_text()
