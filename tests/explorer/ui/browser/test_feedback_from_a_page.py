"""The JavaScript of docs/keys.md, in a real Chromium, on a page of another origin than the explorer's."""

from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import CHAT, engine_place
from tests.doubles.serving import serving
from tests.explorer.running import HELLO, eventually, explorer_running, settings_for
from tests.explorer.ui.browser.chromium import CHROMIUM, chromium_running
from tests.house.documents.page_files import DOCS, blocks_of
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyGrant

pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="NOT TESTED: there is no Chromium; run scripts/install-clients, or apt install chromium"
)

[SCRIPT] = [block.text for block in blocks_of(DOCS / "keys.md") if block.language == "js"]


async def blank(scope: Any, receive: Any, send: Any) -> None:
    """Somebody's web page."""
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
    await send({"type": "http.response.body", "body": b"<!doctype html><title>shop</title>"})


@pytest.mark.parametrize("admitted", [True, False])
def test_a_web_page_gives_feedback_by_a_token_where_its_origin_is_admitted(tmp_path: Path, admitted: bool) -> None:
    with serving(blank) as page_url, engine_place() as place:
        origins = (page_url,) if admitted else ()
        settings = settings_for(tmp_path, [place.fresh().url])
        explorer_settings = settings.explorer.model_copy(update={"cors_allow_origins": origins})
        with explorer_running(settings.model_copy(update={"explorer": explorer_settings})) as explorer:
            grant = KeyGrant(name="web", scopes=(Scope.INFERENCE, Scope.FEEDBACK))
            key = {"Authorization": f"Bearer {explorer.ledger.keys.create(grant, actor='test')[1]}"}
            eventually(lambda: explorer.http.get("/v1/models").status_code == 401)
            msg_id = explorer.http.post(CHAT, json=HELLO, headers=key).json()["id"]
            asked = {"msg_id": msg_id, "source": "ann"}
            token = explorer.http.post("/v1/feedback_tokens", json=asked, headers=key).json()["token"]
            script = SCRIPT.replace("https://model.example.com", explorer.url).replace("chatcmpl-…", msg_id)
            with chromium_running() as browser:
                tab = browser.new_page()
                tab.goto(page_url)
                said = tab.evaluate(
                    f"token => {script.strip()}.then(answer => answer.status, error => error.name)", token
                )
            assert said == (200 if admitted else "TypeError")
            if admitted:
                eventually(lambda: explorer.rows("SELECT source, value FROM feedback") == [("key:web/ann", 1.0)])
            else:
                assert explorer.rows("SELECT source FROM feedback") == []
