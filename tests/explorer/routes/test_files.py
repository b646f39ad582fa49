"""Files and uploads, as OpenAI's own client and raw requests send them."""

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai import OpenAI

from tests.explorer.running import RunningExplorer, eventually
from tuneloop.explorer.jobs import LineChecks
from tuneloop.explorer.routes import files as file_routes
from tuneloop.explorer.routes.files import MAX_FILE_BYTES, sweep
from tuneloop.shared.errors import JobRefused
from tuneloop.shared.experience import JobState, Scope
from tuneloop.shared.ledger.files import FILES
from tuneloop.shared.ledger.keys import KeyGrant
from tuneloop.shared.ledger.policies import JobDraft

LINE = json.dumps({"messages": [{"role": "user", "content": "ü"}, {"role": "assistant", "content": "7"}]}).encode()
DATA = (LINE + b"\n") * 3


@pytest.fixture
def client(explorer: RunningExplorer) -> OpenAI:
    return explorer.openai()


def on_disk(explorer: RunningExplorer) -> dict[str, bytes]:
    folder = explorer.settings.job_dir / FILES
    return {each.name: each.read_bytes() for each in folder.iterdir()} if folder.exists() else {}


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return answer.status_code, error["code"], error["message"]


def post(explorer: RunningExplorer, data: bytes = DATA, **fields: str) -> httpx.Response:
    form = {"purpose": "fine-tune", **fields}
    return explorer.http.post("/v1/files", files={"file": ("a.jsonl", data)}, data=form)


def test_openais_client_uploads_lists_reads_and_deletes(client: OpenAI, explorer: RunningExplorer) -> None:
    before = time.time()
    made = client.files.create(file=("größe.jsonl", DATA), purpose="fine-tune")
    assert (made.object, made.bytes, made.filename, made.purpose) == ("file", len(DATA), "größe.jsonl", "fine-tune")
    assert (made.status, made.expires_at) == ("processed", None)
    assert before - 2 < made.created_at < time.time() + 2
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == DATA == on_disk(explorer)[made.id]
    assert [each.id for each in client.files.list()] == [made.id]
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "file")
    assert list(client.files.list()) == []
    for verb in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            verb(made.id)


def test_lists_have_pages_in_both_orders(client: OpenAI) -> None:
    made = [client.files.create(file=(f"{number}", DATA), purpose="fine-tune").id for number in range(5)]
    assert [each.id for each in client.files.list(limit=2)] == made[::-1]
    assert [each.id for each in client.files.list(limit=2, order="asc")] == made
    assert [each.id for each in client.files.list(after=made[2], order="asc")] == made[3:]
    assert list(client.files.list(purpose="batch")) == []
    client.files.delete(made[2])
    assert [each.id for each in client.files.list(after=made[2], order="asc")] == made[3:]
    page = client.files.list(limit=2, order="asc")
    assert page.has_more
    for wrong in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}, {"after": "file-x"}):
        with pytest.raises(openai.BadRequestError):
            client.files.list(**wrong)  # type: ignore[arg-type]


def test_a_file_expires_by_itself_and_its_bytes_go(client: OpenAI, explorer: RunningExplorer) -> None:
    made = client.files.create(
        file=("a", DATA), purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600
    clock = explorer.ledger.files._clock
    explorer.ledger.files._clock = lambda: clock() + 3601
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    assert sweep(explorer.settings.job_dir / FILES, explorer.ledger) == [made.id]
    assert on_disk(explorer) == {}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"purpose": "assistants"}, "purpose must be one of: fine-tune"),
        ({"purpose": ""}, "purpose must be one of"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}, "3600 and 2592000"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "an anchor"),
        ({"expires_after[seconds]": "3600"}, "an anchor"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"}, "and seconds"),
        ({"colour": "red"}, "unknown field 'colour'"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_leaves_nothing(
    explorer: RunningExplorer, fields: dict[str, str], words: str
) -> None:
    status, _, message = error_of(post(explorer, **fields))
    assert status == 400
    assert words in message
    assert on_disk(explorer) == {}


def form(*parts: bytes, end: bytes = b"--x--\r\n") -> bytes:
    return b"".join(b"--x\r\n" + each + b"\r\n" for each in parts) + end


NAMED = b'Content-Disposition: form-data; name="file"; filename="%s"\r\n\r\nabc'
PURPOSE = b'Content-Disposition: form-data; name="purpose"\r\n\r\nfine-tune'


@pytest.mark.parametrize(
    ("body", "kind", "code"),
    [
        (b'{"file": "abc"}', "application/json", "invalid_content_type"),
        (b"abc", "multipart/form-data", "invalid_content_type"),
        (b"abc", "multipart/form-data; boundary=x", "invalid_multipart"),
        (form(PURPOSE), "multipart/form-data; boundary=x", "missing_required_parameter"),
        (form(PURPOSE, NAMED % b"a", end=b""), "multipart/form-data; boundary=x", "invalid_multipart"),
        (form(NAMED % b"a", NAMED % b"b", PURPOSE), "multipart/form-data; boundary=x", "invalid_value"),
        (form(NAMED % b"", PURPOSE), "multipart/form-data; boundary=x", "missing_required_parameter"),
        (form(NAMED % (b"a" * 300), PURPOSE), "multipart/form-data; boundary=x", "invalid_value"),
        (form((NAMED % b"a")[:-3], PURPOSE), "multipart/form-data; boundary=x", "empty_file"),
        (form(NAMED % b"a", PURPOSE + b"e" * 70_000), "multipart/form-data; boundary=x", "body_too_large"),
        (form(b"X: " + b"e" * 70_000), "multipart/form-data; boundary=x", "invalid_multipart"),
    ],
)
def test_a_broken_form_is_refused_and_leaves_nothing(
    explorer: RunningExplorer, body: bytes, kind: str, code: str
) -> None:
    answer = explorer.http.post("/v1/files", content=body, headers={"content-type": kind})
    assert error_of(answer)[1] == code
    assert on_disk(explorer) == {}


def test_the_file_may_come_before_its_purpose_in_small_pieces(explorer: RunningExplorer) -> None:
    def slowly() -> Iterator[bytes]:
        yield from (bytes([each]) for each in form(NAMED % b"a.jsonl", PURPOSE))

    kind = {"content-type": 'multipart/form-data; boundary="x"'}
    made = explorer.http.post("/v1/files", content=slowly(), headers=kind).json()
    assert on_disk(explorer) == {made["id"]: b"abc"}


def raw(explorer: RunningExplorer, length: int, body: bytes) -> socket.socket:
    address = urlsplit(explorer.url)
    sock = socket.create_connection((address.hostname, address.port), 30)
    head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n"
    sock.sendall(head.encode() + b"content-type: multipart/form-data; boundary=x\r\n\r\n" + body)
    return sock


def test_two_gigabytes_are_refused_before_they_come(explorer: RunningExplorer) -> None:
    with raw(explorer, 2 << 30, b"") as sock:
        answer = sock.recv(4096)
    assert b" 413 " in answer.splitlines()[0]
    assert b"536870912 bytes (512 MB)" in answer
    assert on_disk(explorer) == {}


def test_chunks_beyond_the_bound_are_refused_and_leave_nothing(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_routes, "MAX_FILE_BYTES", 5 << 20)

    def endless() -> Iterator[bytes]:
        yield b"--x\r\n" + NAMED % b"a"
        for _ in range(200):
            yield b"x" * (64 << 10)

    kind = {"content-type": "multipart/form-data; boundary=x"}
    answer = explorer.http.post("/v1/files", content=endless(), headers=kind)
    assert error_of(answer)[:2] == (413, "file_too_large")
    assert on_disk(explorer) == {}


def test_a_file_larger_than_all_that_may_be_held_goes_to_disk_in_pieces(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = explorer.app.limits
    monkeypatch.setattr(limits, "max_held_bytes", 4 << 20)
    data = os.urandom(24 << 20)
    made = post(explorer, data).json()
    assert hashlib.sha256(on_disk(explorer)[made["id"]]).digest() == hashlib.sha256(data).digest()
    stored = explorer.ledger.files.find(made["id"])
    assert stored is not None
    assert stored.sha256 == hashlib.sha256(data).hexdigest()
    eventually(lambda: limits.held_bytes == 0)
    assert explorer.http.get(f"/v1/files/{made['id']}/content").content == data


def test_a_client_that_leaves_leaves_nothing(explorer: RunningExplorer) -> None:
    sock = raw(explorer, 1000, b"--x\r\n" + NAMED % b"a")
    eventually(lambda: len(on_disk(explorer)) == 1)
    sock.close()
    eventually(lambda: on_disk(explorer) == {})


def test_a_full_disk_leaves_nothing(explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch) -> None:
    free = file_routes.shutil.disk_usage(explorer.settings.job_dir).free
    monkeypatch.setattr(file_routes, "RESERVED_BYTES", free + (1 << 30))
    assert error_of(post(explorer))[:2] == (507, "storage_full")
    assert on_disk(explorer) == {}


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> Any:
        path.touch()
        return Path("/dev/full").open("wb")

    monkeypatch.setattr(file_routes, "new_unlinked", full)
    assert error_of(post(explorer, b"x" * (3 << 20)))[:2] == (507, "storage_full")
    assert error_of(post(explorer))[:2] == (507, "storage_full")
    assert on_disk(explorer) == {}
    assert explorer.openai().files.list().data == []


def test_an_upload_in_parts_is_one_file(client: OpenAI, explorer: RunningExplorer) -> None:
    begun = client.uploads.create(bytes=len(DATA), filename="a.jsonl", mime_type="text/jsonl", purpose="fine-tune")
    assert (begun.object, begun.status, begun.expires_at) == ("upload", "pending", begun.created_at + 3600)
    second = client.uploads.parts.create(begun.id, data=DATA[10:])
    first = client.uploads.parts.create(begun.id, data=DATA[:10])
    assert (first.object, first.upload_id) == ("upload.part", begun.id)
    with pytest.raises(openai.BadRequestError, match="MD5"):
        client.uploads.complete(begun.id, part_ids=[first.id, second.id], md5="0" * 32)
    md5 = hashlib.md5(DATA).hexdigest()
    done = client.uploads.complete(begun.id, part_ids=[first.id, second.id], md5=md5)
    assert done.status == "completed"
    assert done.file is not None
    assert client.files.content(done.file.id).read() == DATA
    again = client.uploads.complete(begun.id, part_ids=[first.id, second.id])
    assert again.file == done.file
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.uploads.parts.create(begun.id, data=b"x")
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.uploads.cancel(begun.id)
    assert set(sweep(explorer.settings.job_dir / FILES, explorer.ledger)) == {first.id, second.id}
    assert set(on_disk(explorer)) == {done.file.id}


def test_the_clients_own_helper_uploads_a_large_file(client: OpenAI, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(DATA * 1000)
    done = client.uploads.upload_file_chunked(file=file, mime_type="text/jsonl", purpose="fine-tune", part_size=100_000)
    assert done.file is not None
    assert client.files.content(done.file.id).read() == DATA * 1000


def test_uploads_that_are_wrong_cancelled_or_too_late(client: OpenAI, explorer: RunningExplorer) -> None:
    def begin(size: int = len(DATA)) -> str:
        return client.uploads.create(bytes=size, filename="a", mime_type="text/jsonl", purpose="fine-tune").id

    with pytest.raises(openai.APIStatusError, match="536870912"):
        begin(MAX_FILE_BYTES + 1)
    one = begin()
    part = client.uploads.parts.create(one, data=DATA[:10])
    for part_ids in ([], [part.id], ["part_x"], [part.id, part.id]):
        with pytest.raises(openai.BadRequestError):
            client.uploads.complete(one, part_ids=part_ids)
    assert client.uploads.cancel(one).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.uploads.complete(one, part_ids=[part.id])
    two = begin()
    with pytest.raises(openai.APIStatusError, match="too large"):
        client.uploads.parts.create(two, data=DATA * 3)
    late = client.uploads.parts.create(two, data=DATA)
    clock = explorer.ledger.files._clock
    explorer.ledger.files._clock = lambda: clock() + 3601
    with pytest.raises(openai.BadRequestError, match="expired"):
        client.uploads.complete(two, part_ids=[late.id])
    assert set(sweep(explorer.settings.job_dir / FILES, explorer.ledger)) == {part.id, late.id}


def test_bytes_stay_while_a_job_needs_them(
    explorer: RunningExplorer, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LineChecks, "check", lambda *_: None)  # else the job may fail before it is cancelled
    made = client.files.create(file=("a", DATA), purpose="fine-tune").id
    draft = JobDraft(
        tenant="default",
        model="t",
        parent=0,
        options={},
        method="supervised",
        hyperparameters={},
        training_file=made,
        rows_in_all=3,
        total_steps=1,
        by="test",
    )
    job = explorer.ledger.jobs.create(draft).id
    client.files.delete(made)
    folder = explorer.settings.job_dir / FILES
    assert list(client.files.list()) == []
    assert sweep(folder, explorer.ledger) == []
    explorer.ledger.jobs.change(job, JobState.CANCELLED, "cancelled")
    assert sweep(folder, explorer.ledger) == [made]
    with pytest.raises(JobRefused):
        explorer.ledger.jobs.change(job, JobState.QUEUED, "again")


def test_bytes_that_no_row_names_go_after_a_while(explorer: RunningExplorer) -> None:
    folder = explorer.settings.job_dir / FILES
    folder.mkdir(parents=True, exist_ok=True)
    for name, age_s in (("file-new", 60), ("file-old", 3700)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    assert sweep(folder, explorer.ledger) == ["file-old"]


def test_tenants_see_their_own_files_alone(explorer: RunningExplorer) -> None:
    def client_of(tenant: str, *scopes: Scope) -> OpenAI:
        key = explorer.ledger.keys.create(KeyGrant(name="k", tenant=tenant, scopes=scopes), actor="test")[1]
        client = OpenAI(base_url=f"{explorer.url}/v1", api_key=key, max_retries=0)
        eventually(lambda: explorer.http.get("/training").status_code == 401)
        eventually(lambda: explorer.http.get("/training", headers=client.auth_headers).status_code == 200)
        return client

    acme, umbra = (client_of(name, Scope.READ, Scope.COMMIT) for name in ("acme", "umbra"))
    made = acme.files.create(file=("a", DATA), purpose="fine-tune").id
    upload = acme.uploads.create(bytes=9, filename="a", mime_type="b", purpose="fine-tune").id
    assert list(umbra.files.list()) == []
    for verb in (umbra.files.retrieve, umbra.files.content, umbra.files.delete):
        with pytest.raises(openai.NotFoundError):
            verb(made)
    with pytest.raises(openai.NotFoundError):
        umbra.uploads.cancel(upload)
    reader = client_of("acme", Scope.READ)
    assert reader.files.retrieve(made).id == made
    for refused in (lambda: reader.files.delete(made), lambda: reader.files.create(file=b"x", purpose="fine-tune")):
        with pytest.raises(openai.PermissionDeniedError):
            refused()
