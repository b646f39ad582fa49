"""Takes the pictures of the page that the documentation shows, of a ledger that is made up.

    scripts/screenshots [FOLDER]

Where the page tells a path, the pictures say /data/tuneloop for the folder that the ledger is made in.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.explorer.ui.browser.chromium import CHROMIUM, ROOT, chromium_running, wait_until_whole
from tests.explorer.ui.conftest import Filled, filled_running
from tests.explorer.ui.filled import Scale

WINDOW = {"width": 1200, "height": 1000}

SCALE = Scale(replies=300, seconds=1500, people=150, batch=224, gain=0.11, hostile=False, well=True)

_REPLACE = """([from, to]) => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) walker.currentNode.data = walker.currentNode.data.replaceAll(from, to);
}"""


def main(folder: Path) -> None:
    """Write a picture of each page."""
    if CHROMIUM is None:
        raise SystemExit("screenshots: there is no Chromium; run scripts/install-clients")
    with tempfile.TemporaryDirectory() as made_in, filled_running(Path(made_in), SCALE) as filled:
        commented = "SELECT msg_id FROM feedback WHERE kind = 'comment' ORDER BY id DESC"
        seen = filled.explorer.rows(commented)[1][0]  # the last but one: it was trained on
        paths = {
            "overview": "",
            "exchange": f"/exchanges/{seen}",
            "versions": "/versions",
            "preferences": "/preferences",
            "doctor": "/doctor",
        }
        with chromium_running() as browser:
            page = browser.new_page(viewport=WINDOW)
            for name, path in paths.items():
                _take(page, filled, path, made_in, folder / f"{name}.png")


def _take(page: Any, filled: Filled, path: str, made_in: str, file: Path) -> None:
    page.goto(f"{filled.explorer.url}/ui{path}")
    wait_until_whole(page)
    page.evaluate(_REPLACE, [made_in, "/data/tuneloop"])
    page.screenshot(path=file)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "ui")
