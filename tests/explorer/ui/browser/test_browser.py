"""The page in a real Chromium: light and dark, on a phone, by keyboard alone, and what axe finds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import CHAT, engine_place
from tests.doubles.serving import serving
from tests.explorer.running import HELLO, eventually, explorer_running, settings_for
from tests.explorer.ui.browser.chromium import CHROMIUM, CLIENTS, chromium_running, wait_until_whole
from tests.explorer.ui.conftest import Filled
from tests.explorer.ui.filled import VERSIONS
from tests.house.documents.page_files import DOCS, blocks_of
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyGrant

sync_api = pytest.importorskip("playwright.sync_api")

AXE = CLIENTS / "node" / "node_modules" / "axe-core" / "axe.min.js"

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="NOT TESTED: there is no Chromium; run scripts/install-clients, or apt install chromium"
)
needs_axe = pytest.mark.skipif(not AXE.exists(), reason="NOT TESTED: there is no axe-core; run scripts/install-clients")
pytestmark = needs_chromium

PAGES = ("", "/exchanges", "/exchanges/{planted}", "/versions", "/versions/6", "/versions/compare?a=2&b=6",
         "/preferences", "/trainer", "/doctor", "/exchanges?version=x", "/nothing")  # fmt: skip

#: The pages above it.
FRONT = ("/", "/docs")

#: The width that a field takes for what is in it where nothing holds it back.
NEEDED_WIDTH = """selector => {
  const copy = document.querySelector(selector).cloneNode();
  copy.style.cssText = "width: max-content; position: absolute";
  document.body.append(copy);
  const width = copy.getBoundingClientRect().width;
  copy.remove();
  return width;
}"""

DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}

SCHEMES = ("light", "dark")

on_both_windows = pytest.mark.parametrize("window", [DESKTOP, PHONE], ids=["desktop", "phone"])


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with chromium_running() as browser:
        yield browser


class Tab:
    """A tab of a browser, and what went wrong in it."""

    def __init__(self, browser: sync_api.Browser, filled: Filled, **context: object) -> None:
        self._filled = filled
        self._context = browser.new_context(**context)
        self.page = self._context.new_page()
        self.page.set_default_timeout(60_000)
        self.wrong: list[str] = []
        self.page.on("dialog", lambda dialog: (self.wrong.append(dialog.message), dialog.dismiss()))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda message: self.wrong.append(message.text) if message.type == "error" else None)

    def open(self, path: str) -> sync_api.Page:
        """The page, with what it asks for afterwards."""
        address = path.format(planted=self._filled.planted.msg_id)
        self.page.goto(f"{self._filled.explorer.url}{'' if path in FRONT else '/ui'}{address}")
        wait_until_whole(self.page)
        return self.page

    def close(self) -> None:
        self._context.close()


@pytest.fixture
def tab(browser: sync_api.Browser, filled: Filled) -> Iterator[Tab]:
    tab = Tab(browser, filled)
    yield tab
    tab.close()


@on_both_windows
def test_every_page_fits_its_window_and_does_nothing_wrong(
    browser: sync_api.Browser, filled: Filled, window: dict[str, int]
):
    tab = Tab(browser, filled, viewport=window)
    for path in PAGES + FRONT:
        page = tab.open(path)
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            fits = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert fits, f"{path} is wider than the window"
        unexplained = "each => [...each].filter(one => !one.querySelector('.term')).map(one => one.textContent)"
        assert page.locator("main :is(th.num, .facts dt)").evaluate_all(unexplained) == [], path
    assert [each for each in tab.wrong if "status of 40" not in each] == []  # the two pages that are refused
    tab.close()


@on_both_windows
def test_what_is_filled_in_is_seen_whole(browser: sync_api.Browser, filled: Filled, window: dict[str, int]):
    tab = Tab(browser, filled, viewport=window)
    page = tab.open("/exchanges?since=2026-11-24T23:45&until=2026-11-24T23:59")
    for name in ("since", "until"):
        needs = page.evaluate(NEEDED_WIDTH, f"input[name={name}]")
        assert page.locator(f"input[name={name}]").bounding_box()["width"] >= needs, name
    tab.close()


def test_a_tap_explains_a_number(browser: sync_api.Browser, filled: Filled):
    tab = Tab(browser, filled, viewport=PHONE, has_touch=True)
    page, about = tab.open(""), "Newest step: How many updates of the weights the trainer has made."
    assert page.get_by_role("button", name="Newest step").get_attribute("title") == about.partition(": ")[2]
    page.get_by_role("button", name="Newest step").tap()
    assert page.locator("#about").text_content() == about
    page.locator("h2").first.tap()
    assert page.locator("#about").is_hidden()
    tab.close()


def test_on_a_phone_the_list_is_seen_below_its_filters(browser: sync_api.Browser, filled: Filled):
    tab = Tab(browser, filled, viewport=PHONE)
    page, state = tab.open("/exchanges"), "select[name=state]"
    assert page.locator("table.list").bounding_box()["y"] < PHONE["height"] / 2
    assert not page.locator(state).is_visible()
    page.get_by_label("more").check()
    page.locator(state).select_option("rewarded")
    page.get_by_role("button", name="Find").click()
    assert page.locator(state).is_visible(), "a filter that is set is seen"
    assert "state=rewarded" in page.url
    tab.open("/exchanges?text=a")
    assert not page.locator(state).is_visible()
    tab.open("/versions/compare?a=2&b=6")
    assert page.get_by_label("Before").is_visible(), "a form without folded fields shows them all"
    tab.close()


@needs_axe
@pytest.mark.parametrize(
    ("window", "scheme"),
    [
        pytest.param(DESKTOP, "light", id="desktop-light"),
        pytest.param(PHONE, "dark", id="phone-dark"),
        pytest.param(DESKTOP, "dark", id="desktop-dark", marks=pytest.mark.soak),
        pytest.param(PHONE, "light", id="phone-light", marks=pytest.mark.soak),
    ],
)
def test_axe_finds_nothing_serious(browser: sync_api.Browser, filled: Filled, window: dict[str, int], scheme: str):
    tab = Tab(browser, filled, color_scheme=scheme, viewport=window, bypass_csp=True)
    for path in PAGES + FRONT:
        page = tab.open(path)
        page.evaluate(AXE.read_text())
        violations = page.evaluate("axe.run().then(found => found.violations.map(each => [each.id, each.impact]))")
        assert [each for each in violations if each[1] in {"serious", "critical"}] == [], path
    tab.close()


def test_nothing_that_a_client_wrote_runs(tab: Tab):
    page = tab.open("/exchanges/{planted}")
    assert page.evaluate("document.querySelectorAll('main script, main img, main iframe').length") == 0
    assert "<script>alert('x')</script>" in page.inner_text("main")
    assert "⟨U+202E⟩" in page.inner_text("main")
    assert tab.wrong == []


def test_charts_are_drawn(tab: Tab):
    written = "const told = CanvasRenderingContext2D.prototype.fillText; window.marks = new Map();"
    written += "CanvasRenderingContext2D.prototype.fillText = function (text, ...where) {"
    written += " const name = JSON.parse(this.canvas.closest('[data-chart]').dataset.chart).y;"
    written += " window.marks.set(name, [...(window.marks.get(name) || []), text]); told.call(this, text, ...where); }"
    tab.page.add_init_script(written)
    page = tab.open("/trainer?curves=all")
    sync_api.expect(page.locator(".chart canvas")).to_have_count(8, timeout=60_000)
    marks = page.evaluate("Object.fromEntries(window.marks)")
    assert len(set(marks["mismatch_kl/mean"]) & {"2e-6", "3e-6"}) == 2  # not "0 0 0"
    assert {"1e-6", "9e-7"} <= set(marks["actor/lr"])
    assert {"-1", "0", "1"} <= set(marks["off_policy/outside"])  # not 0 to 100
    # The overview is drawn anew when its stream opens.
    sync_api.expect(tab.open("").locator(".chart canvas")).to_have_count(1, timeout=60_000)


def test_a_reply_is_rated_by_keyboard_alone(tab: Tab, filled: Filled):
    page = tab.open("/exchanges?state=recorded&version=6")
    page.locator("table.list a").nth(4).focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/exchanges/chatcmpl-*")
    for _ in range(60):
        if page.evaluate("document.activeElement.matches('.rate > summary')"):
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.value") == "up"
    page.keyboard.press("Enter")
    page.wait_for_url("**?outcome=accepted")
    assert "Stored." in page.inner_text("main")


def test_enter_in_a_field_saves_what_is_in_the_form(tab: Tab, filled: Filled):
    [reply, *_] = filled.explorer.rows("SELECT msg_id FROM experiences WHERE state = 'recorded' ORDER BY sampled_at")
    page = tab.open(f"/exchanges/{reply[0]}")
    page.locator(".rate > summary").click()
    page.get_by_label("or a reward").fill("-1")
    page.keyboard.press("Enter")
    page.wait_for_url("**?outcome=accepted")
    rows = filled.explorer.rows(f"SELECT kind, value FROM feedback WHERE msg_id = '{reply[0]}'")
    assert [tuple(row) for row in rows] == [("number", -1.0)]


def test_enter_beside_a_reason_decides_nothing(tab: Tab, filled: Filled):
    page = tab.open("/versions/3")
    page.get_by_label("Why").fill("it is better")
    page.keyboard.press("Enter")
    page.wait_for_timeout(200)
    assert page.url.endswith("/ui/versions/3")
    assert page.get_by_label("Why").input_value() == "it is better"
    assert [each.version for each in filled.explorer.ledger.versions.all() if each.pinned] == []
    assert filled.explorer.ledger.versions.champion().version == VERSIONS


def test_one_key_prefers_and_one_skips(tab: Tab, filled: Filled):
    page = tab.open("/preferences")
    left = page.locator("input[name=better]").first.input_value()
    page.keyboard.press("1")
    page.wait_for_url("**?outcome=accepted")
    rows = filled.explorer.rows("SELECT msg_id, choice FROM feedback WHERE kind = 'preference' ORDER BY id DESC")
    assert f"{rows[0][0]}:{rows[0][1]}" == left
    page.keyboard.press("s")
    page.wait_for_url("**?after=*")


def test_the_skip_link_leads_past_the_navigation(tab: Tab):
    page = tab.open("/versions")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_the_overview_changes_while_one_looks(tab: Tab, filled: Filled):
    page = tab.open("")
    before = page.locator("#overview").text_content() or ""
    said = filled.filler.exchange(6)
    filled.filler.ledger.recording.record([said, *(filled.filler.say(said, value=1.0) for _ in range(2))])
    sync_api.expect(page.locator("#overview")).not_to_have_text(before, timeout=60_000)
    assert tab.wrong == []


# The JavaScript of docs/keys.md, in a real Chromium, on a page of another origin than the explorer's.


pytest.importorskip("playwright.sync_api")

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
def test_a_web_page_gives_feedback_by_a_token_where_its_origin_is_admitted(
    tmp_path: Path, browser: sync_api.Browser, admitted: bool
) -> None:
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
            tab = browser.new_page()
            tab.goto(page_url)
            said = tab.evaluate(f"token => {script.strip()}.then(answer => answer.status, error => error.name)", token)
            tab.close()
            assert said == (200 if admitted else "TypeError")
            if admitted:
                eventually(lambda: explorer.rows("SELECT source, value FROM feedback") == [("key:web/ann", 1.0)])
            else:
                assert explorer.rows("SELECT source FROM feedback") == []
