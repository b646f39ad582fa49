"""Chromium, where there is one: installed, or unpacked below .venv by scripts/install-clients."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
CLIENTS = ROOT / ".venv" / "clients"
_UNPACKED = CLIENTS / "chromium"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium", path=str(_UNPACKED / "usr" / "lib" / "chromium"))


#: What stands where a part of a page is still to come.
_WAITS = re.compile("^(Counting|Looking|Reading the tokens)…$")


def wait_until_whole(page: Any) -> None:
    """Wait for what a page asks for afterwards."""
    from playwright.sync_api import expect

    expect(page.get_by_text(_WAITS)).to_have_count(0, timeout=60_000)


@contextmanager
def chromium_running() -> Iterator[Any]:
    """A browser of Playwright's."""
    from playwright.sync_api import sync_playwright  # where it is missing, these tests are left out

    folders = sorted({str(each.parent) for each in _UNPACKED.rglob("*.so*")})
    libraries = {"LD_LIBRARY_PATH": ":".join(folders)} if folders else {}
    with sync_playwright() as playwright:
        arguments = {"executable_path": CHROMIUM, "args": ["--no-sandbox"], "env": {**os.environ, **libraries}}
        browser = playwright.chromium.launch(**arguments, timeout=120_000)
        yield browser
        browser.close()
