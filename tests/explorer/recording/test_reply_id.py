import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneloop.explorer.transcript import (
    MAX_CHOICES,
    PREFIX,
    PREFIXES,
    ParsedReplyId,
    ReplyIdSigner,
)
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import minted_at
from tuneloop.shared.job_marks import load_key

SIGNER = ReplyIdSigner(b"k" * 32)


#: Minted for 128 choices, the most that there were.
EARLIER = "chatcmpl-06h0h7kml3rtguqcg04l0na8g16kub3obflfgkg4"
COUNTS = st.integers(1, 300) | st.integers(1, MAX_CHOICES)


@given(st.text(max_size=20), COUNTS)
def test_what_was_minted_is_read(tenant: str, choices: int) -> None:
    msg_id = SIGNER.mint(tenant, choices)
    assert len(msg_id) == len(PREFIX) + 40
    assert SIGNER.parse(msg_id, tenant) == ParsedReplyId(msg_id, None)
    assert SIGNER.parse(f"{msg_id}:{choices - 1}", tenant) == ParsedReplyId(msg_id, choices - 1)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_an_id_tells_when_it_was_minted(prefix: str) -> None:
    before = time.time()
    assert before - 0.001 <= minted_at(SIGNER.mint("acme", 1, prefix)) <= time.time()


@given(st.integers(0, 39), st.sampled_from("0123456789abcdefghijklmnopqrstuv"))
def test_a_flipped_character_is_refused(place: int, other: str) -> None:
    msg_id = SIGNER.mint("acme", 4)
    place += len(PREFIX)
    flipped = msg_id[:place] + other + msg_id[place + 1 :]
    assert (SIGNER.parse(flipped, "acme") is None) == (flipped != msg_id)


@given(st.text(max_size=60))
def test_a_guess_is_refused(text: str) -> None:
    assert SIGNER.parse(text, "acme") is None
    assert SIGNER.parse(PREFIX + text, "acme") is None


def test_another_tenant_or_key_is_refused() -> None:
    msg_id = SIGNER.mint("acme", 1)
    assert SIGNER.parse(msg_id, "other") is None
    assert ReplyIdSigner(b"x" * 32).parse(msg_id, "acme") is None


def test_an_id_of_an_earlier_release_is_read() -> None:
    assert SIGNER.parse(EARLIER, "acme") == ParsedReplyId(EARLIER, None)
    assert SIGNER.parse(f"{EARLIER}:127", "acme") == ParsedReplyId(EARLIER, 127)
    assert SIGNER.parse(f"{EARLIER}:128", "acme") is None


def test_ids_sort_by_time() -> None:
    ids = []
    for _ in range(5):
        ids.append(SIGNER.mint("acme", 1))
        time.sleep(0.002)
    assert ids == sorted(ids)
    assert len({SIGNER.mint("acme", 1) for _ in range(1000)}) == 1000


def test_the_key_is_made_once_by_many_processes(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib, tuneloop.shared.job_marks as m\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "print(m.load_key(pathlib.Path(sys.argv[1])).hex())"
    )
    path = tmp_path / "secrets" / "msg_id.key"
    command = [sys.executable, "-c", script, str(path)]
    makers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(6)
    ]
    assert {maker.stdout.readline() for maker in makers if maker.stdout} == {"ready\n"}
    assert len({maker.communicate("\n")[0] for maker in makers}) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["msg_id.key"]
    assert len(load_key(path)) == 32


def test_a_key_that_was_cut_short_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "msg_id.key"
    path.write_bytes(b"")
    with pytest.raises(EnvironmentRefused, match="32 bytes"):
        load_key(path)
