"""Who may use the page."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import schemathesis
from fastapi.routing import APIRoute

from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.explorer.ui.conftest import Filled, filled_running
from tests.explorer.ui.test_pages import words
from tests.explorer.wire import Wire
from tuneloop.explorer.edge import Edge
from tuneloop.explorer.routes.api_operations import describe_api
from tuneloop.explorer.ui.sessions import PATH, BrowserSession, EndedSessions
from tuneloop.shared.experience import Scope, steady_clock
from tuneloop.shared.ledger.keys import KeyGrant, KeyLimits

KEY = "a-key-that-nobody-guesses"
PAGES = ("/ui", "/ui/exchanges", "/ui/waiting", "/ui/exchanges/x", "/ui/exchanges/x/tokens/0", "/ui/none")


@pytest.fixture(scope="module")
def running_keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    with filled_running(tmp_path_factory.mktemp("keyed"), admin_key=KEY) as found:
        yield found


@pytest.fixture
def keyed(running_keyed: Filled) -> Filled:
    running_keyed.explorer.http.cookies.clear()
    return running_keyed


def log_in(http: httpx.Client, key: str = KEY, **fields: str) -> httpx.Response:
    return http.post("/ui/login", data={"key": key, **fields})


def token_in(html: str) -> str:
    found = re.search(r'name="token" value="([^"]+)"', html)
    assert found
    return found[1]


# With a key.


@pytest.mark.parametrize("path", PAGES)
def test_without_a_session_every_page_leads_to_the_login(keyed: Filled, path: str):
    answer = keyed.explorer.http.get(path)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/ui/login?next={path}")


def test_the_admin_key_opens_the_page(keyed: Filled):
    http = keyed.explorer.http
    answer = log_in(http, next="/ui/exchanges")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/exchanges")
    cookie = answer.headers["set-cookie"].lower()
    assert all(word in cookie for word in ("httponly", "samesite=strict", "path=/ui")), cookie
    assert KEY not in answer.headers["set-cookie"]
    assert http.get("/ui").status_code == 200


@pytest.mark.parametrize("broken", ["//[", "http://[", "/ui//[x", "//[::g]/ui"])
def test_what_is_no_address_is_neither_an_origin_nor_where_to_go(keyed: Filled, broken: str):
    http = keyed.explorer.http
    assert http.get("/ui/login", params={"next": broken}).status_code == 200
    assert log_in(http, next=broken).headers["location"] in {"/ui", broken if broken.startswith("/ui/") else "/ui"}
    assert http.post("/ui/login", data={"key": KEY}, headers={"Origin": broken}).status_code == 403


def test_behind_a_proxy_with_tls_the_session_is_sent_by_tls_alone(keyed: Filled):
    for scheme, secure in (("https", True), ("http", False)):
        with httpx.Client(base_url=keyed.explorer.url, headers={"x-forwarded-proto": scheme}) as http:
            assert ("Secure" in log_in(http).headers["set-cookie"]) is secure
            assert f"{scheme}://127.0.0.1" in http.get("/").text


def test_after_a_wrong_key_the_login_still_leads_to_where_one_wanted_to_go(keyed: Filled):
    target = "/ui/exchanges?state=recorded"
    answer = log_in(keyed.explorer.http, "another", next=target)
    assert answer.status_code == 401
    assert "That is not an admin key" in answer.text
    assert "set-cookie" not in answer.headers
    assert f'name="next" value="{target}"' in answer.text
    assert 'name="next" value="/ui"' in log_in(keyed.explorer.http, "another", next="//evil.com").text


@pytest.mark.parametrize(
    "target", ["//evil.com", "https://evil.com/ui", "/feedback", "/ui\\..", "/uix", "javascript:x"]
)
def test_the_login_leads_nowhere_else(keyed: Filled, target: str):
    assert log_in(keyed.explorer.http, next=target).headers["location"] == "/ui"


def test_a_changed_cookie_is_none(keyed: Filled):
    http = keyed.explorer.http
    log_in(http)
    good = http.cookies["tuneloop_ui"]
    nonce, expires, mark, mac = good.split(".")
    forged = (
        *(f"{nonce}.{int(expires) + 1}.{mark}.{mac}", f"{nonce}x.{expires}.{mark}.{mac}", f"{nonce}.{expires}..{mac}"),
        *(f"{nonce}.{expires}.{mark}.", "...", "é.1.x.y", ""),
    )
    for cookie in forged:
        answer = httpx.get(f"{keyed.explorer.url}/ui", headers={"cookie": f"tuneloop_ui={cookie}".encode()})
        assert answer.status_code == 303, cookie


@pytest.mark.parametrize("token", ["", "x"])
def test_a_form_without_the_token_of_its_session_is_refused(keyed: Filled, token: str):
    http = keyed.explorer.http
    log_in(http)
    answer = http.post("/ui/logout", data={"token": token})
    assert answer.status_code == 403
    assert "not of this session" in answer.text


@pytest.mark.parametrize(
    "header", [{"origin": "http://evil.com"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}]
)
def test_a_form_of_another_sites_page_is_refused(keyed: Filled, header: dict[str, str]):
    http = keyed.explorer.http
    log_in(http)
    token = token_in(http.get("/ui").text)
    assert http.post("/ui/logout", data={"token": token}, headers=header).status_code == 403
    assert http.post("/ui/login", data={"key": KEY}, headers=header).status_code == 403


# Without one.


def test_without_a_key_this_machine_needs_no_login(filled: Filled):
    assert "Log out" not in filled.text("/ui")
    assert filled.explorer.http.get("/ui/login").headers["location"] == "/ui"


@pytest.mark.parametrize(
    "host", ["evil.com", "evil.com:8010", "127.0.0.1.evil.com", "", "[::2]", "localhost@evil", "0.0.0.0"]
)
@pytest.mark.parametrize("path", PAGES)
def test_a_name_that_any_site_could_have_is_refused(filled: Filled, host: str, path: str):
    answer = filled.explorer.http.get(path, headers={"host": host})
    assert answer.status_code == 403
    assert "only for this machine itself" in answer.text


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8010", "[::1]:8010"])
def test_names_that_only_this_machine_has_are_taken(filled: Filled, host: str):
    assert filled.explorer.http.get("/ui", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "x-real-ip", "x-forwarded-proto"])
def test_what_a_proxy_brings_is_not_from_this_machine(filled: Filled, header: str):
    assert filled.explorer.http.get("/ui", headers={header: "127.0.0.1"}).status_code == 403


def test_the_page_may_run_nothing_but_our_files(filled: Filled):
    headers = filled.explorer.http.get("/ui").headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


def test_a_key_with_the_scope_admin_opens_the_page_of_its_tenant_until_it_is_revoked(tmp_path: Path):
    with filled_running(tmp_path) as filled:
        keys, http = filled.explorer.ledger.keys, filled.explorer.http
        assert http.get("/ui").status_code == 200
        before = dict(http.cookies)
        made, secret = keys.create(KeyGrant(name="ops", tenant="acme", scopes=(Scope.ADMIN,)), actor="test")
        _, other = keys.create(KeyGrant(name="web", tenant="acme", scopes=(Scope.INFERENCE,)), actor="test")
        eventually(lambda: http.get("/ui").status_code == 303)
        assert httpx.get(f"{filled.explorer.url}/ui", cookies=before).status_code == 303
        assert log_in(http, other).status_code == 401
        assert log_in(http, secret).headers["location"] == "/ui/exchanges"
        for path in ("/ui", "/ui/versions", "/ui/trainer", "/ui/doctor", "/ui/waiting"):
            assert http.get(path).status_code == 403, path
        assert http.post("/ui/versions/0/promote").status_code == 403
        assert "No exchange is in the ledger yet" in http.get("/ui/exchanges").text
        assert http.get(f"/ui/exchanges/{filled.planted.msg_id}").status_code == 404
        keys.revoke(made.key_id, actor="test")
        eventually(lambda: http.get("/ui").status_code == 303)


def test_a_session_that_was_ended_is_over_for_whoever_has_its_cookie(keyed: Filled):
    http = keyed.explorer.http
    log_in(http)
    ended = dict(http.cookies)
    token = token_in(http.get("/ui").text)
    http.cookies.clear()
    log_in(http)
    before = {"Cookie": "; ".join(f"{name}={value}" for name, value in ended.items())}
    assert http.post("/ui/logout", data={"token": token}, headers=before).status_code == 303
    assert httpx.get(f"{keyed.explorer.url}/ui", cookies=ended).status_code == 303
    log_in(http)
    assert http.get("/ui").status_code == 200


def test_ended_sessions_are_forgotten_once_they_would_have_expired(tmp_path: Path):
    path = tmp_path / "ended"
    ended, now = EndedSessions(path), int(steady_clock())
    old, new, other = (BrowserSession(name, now + life, "") for name, life in (("a", -1), ("b", 60), ("c", 60)))
    for session in (old, new):
        ended.add(session)
    path.write_bytes(b"broken\n" + path.read_bytes())
    ended.add(other)
    assert [session in ended for session in (old, new, other)] == [False, True, True]
    path.unlink()
    path.mkdir()
    assert new in ended  # nobody knows
    with pytest.raises(IsADirectoryError):
        ended.add(new)


@contextmanager
def administrator_of_acme(folder: Path, **limits: int) -> Iterator[tuple[Filled, str, str]]:
    """An explorer, the id of an admin key with such limits, whose session the browser has, and a reply to that."""
    with filled_running(folder) as filled:
        grant = KeyGrant(name="ops", tenant="acme", scopes=(Scope.ADMIN, Scope.INFERENCE), limits=KeyLimits(**limits))
        made, secret = filled.explorer.ledger.keys.create(grant, actor="test")
        http = filled.explorer.http
        eventually(lambda: http.get("/ui").status_code == 303)
        asked = http.post("/v1/chat/completions", json=HELLO, headers={"x-api-key": secret})
        filled.explorer.until_flushed()
        log_in(http, secret)
        yield filled, made.key_id, asked.json()["id"]


def test_a_form_whose_key_is_revoked_while_it_comes_is_nobodys(tmp_path: Path):
    with administrator_of_acme(tmp_path) as (filled, key_id, own):
        http, theirs = filled.explorer.http, filled.planted.msg_id
        form = f"token={token_in(http.get(f'/ui/exchanges/{own}').text)}&reward=-1".encode()
        cookie = "; ".join(f"{name}={value}" for name, value in http.cookies.items())
        with Wire(filled.explorer.url) as wire:
            wire.send(
                f"POST /ui/exchanges/{theirs}/feedback HTTP/1.1\r\nHost: x\r\nCookie: {cookie}\r\n"
                f"Expect: 100-continue\r\nContent-Length: {len(form)}\r\n\r\n".encode()
            )
            assert wire.response().status == 100  # it was let in, and its form is waited for
            filled.explorer.ledger.keys.revoke(key_id, actor="test")
            eventually(lambda: http.get("/ui/exchanges").status_code == 303)
            wire.send(form)
            assert wire.response().headers["location"].startswith("/ui/login")
        assert filled.explorer.rows(f"SELECT id FROM feedback WHERE msg_id = '{theirs}' AND source = 'page'") == []


def test_what_is_said_on_the_page_is_of_the_sessions_key_and_its_limits(tmp_path: Path):
    with administrator_of_acme(tmp_path, feedback_per_minute=2) as (filled, _, own):
        http = filled.explorer.http
        form = {"token": token_in(http.get(f"/ui/exchanges/{own}").text), "choice": "0"}
        said = [http.post(f"/ui/exchanges/{own}/feedback", data=form | {"comment": str(n)}) for n in range(3)]
        assert [each.status_code for each in said] == [303, 303, 429]
        assert filled.explorer.rows(f"SELECT DISTINCT source FROM feedback WHERE msg_id = '{own}'") == [
            ("key:ops/page",)
        ]


# What stands at /, /docs and /openapi.json: for browsers, for programs, and for who has no key yet.


DOCS = Path(__file__).parents[3] / "docs"
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def documented_routes() -> set[tuple[str, str]]:
    return {
        (method.upper(), re.sub(r"{\w+}", "{}", path))
        for path, methods in describe_api()["paths"].items()
        for method in methods
    }


def app_routes(app: Edge) -> set[tuple[str, str]]:
    """The routes of the app but those of the page, those of a probe without its body, and the peer's names."""
    return {
        (method, re.sub(r"{[\w:]+}", "{}", route.path))
        for route in app.app.routes
        if isinstance(route, APIRoute) and not route.path.startswith((PATH, "/trinity"))
        for method in route.methods - {"HEAD"}
    }


def test_every_route_is_described_and_none_besides(explorer: RunningExplorer):
    assert documented_routes() == app_routes(explorer.app)


def test_the_description_is_openapi_and_leads_to_guides(explorer: RunningExplorer):
    answer = explorer.http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    found = list(schemathesis.openapi.from_dict(answer.json()).get_all_operations())
    assert len(found) == len(documented_routes())
    guides = {each["externalDocs"]["url"] for methods in answer.json()["paths"].values() for each in methods.values()}
    assert [each for each in guides if not (DOCS.parent / each.partition("#")[0]).exists()] == []


def test_a_browser_and_a_program_are_shown_the_way(explorer: RunningExplorer):
    page = explorer.http.get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert f"export OPENAI_BASE_URL={explorer.url}/v1" in page.text
    assert 'href="/ui"' in page.text
    answer = explorer.http.get("/").json()
    assert answer["base_url"] == f"{explorer.url}/v1"
    assert explorer.http.get(answer["links"]["openapi"]).status_code == 200
    for link in answer["links"].values():
        assert explorer.http.get(link).status_code == 200, link


def test_every_route_is_on_the_page_with_its_fields_and_scopes(explorer: RunningExplorer):
    seen = words(explorer.http.get("/docs").text)
    for method, path in {("POST", "/feedback"), ("GET", "/metrics"), ("POST", "/v1/chat/completions")}:
        assert f"{method} {path} " in seen
    assert "demonstration" in seen
    assert "A key with the scope feedback" in seen


def test_no_key_is_needed_to_see_them(explorer: RunningExplorer):
    explorer.ledger.keys.create(KeyGrant(name="app"), actor="ann")
    eventually(lambda: explorer.http.get("/v1/models").status_code == 401)
    for path in ("/", "/docs", "/openapi.json"):
        assert explorer.http.get(path, headers=BROWSER).status_code == 200


def test_a_name_of_a_host_is_escaped(explorer: RunningExplorer):
    page = explorer.http.get("/", headers={**BROWSER, "host": '127.0.0.1"><script>x</script>'})
    assert "<script>x" not in page.text
