"""What stands at /, /docs and /openapi.json: for browsers, for programs, and for who has no key yet."""

import re
from pathlib import Path

import schemathesis
from fastapi.routing import APIRoute

from tests.explorer.running import RunningExplorer, eventually
from tests.explorer.ui.test_pages import words
from tuneloop.explorer.edge import Edge
from tuneloop.explorer.routes.api_operations import describe_api
from tuneloop.explorer.ui.sessions import PATH
from tuneloop.shared.ledger.keys import KeyGrant

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
    assert [each for each in guides if not (DOCS.parent / each).exists()] == []


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
