"""The sums of a release are signed with git's key, and a changed sum is noticed."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

SIGN = Path(__file__).parents[2] / "scripts" / "sign"
KEY = "release@example.org"


@pytest.mark.skipif(shutil.which("gpg") is None, reason="gpg is not installed")
def test_sums_are_signed_and_a_changed_one_is_noticed(tmp_path: Path) -> None:
    home, sums = tmp_path / "gnupg", tmp_path / "SHA256SUMS"
    home.mkdir(mode=0o700)
    git = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "user.signingkey", "GIT_CONFIG_VALUE_0": KEY}
    environment = os.environ | git | {"GNUPGHOME": str(home)}

    def code(*command: Any, **but: str) -> int:
        done = subprocess.run(command, env=environment | but, capture_output=True, check=False, timeout=60)
        return done.returncode

    assert code("gpg", "--batch", "--passphrase", "", "--quick-generate-key", KEY, "ed25519", "sign", "never") == 0
    for name in ("one.whl", "two.tar.gz"):
        (tmp_path / name).write_text(name)
    assert code(SIGN, tmp_path) == 0
    assert code("gpg", "--verify", f"{sums}.asc", sums) == 0
    sums.write_text(sums.read_text().replace("one", "another"))
    assert code("gpg", "--verify", f"{sums}.asc", sums) == 1
    assert code(SIGN, tmp_path, GIT_CONFIG_VALUE_0="") == 2
    code("gpgconf", "--kill", "all")
