"""Without keys, a real proxy on the same machine lets no stranger in."""

from pathlib import Path

import httpx
import pytest

from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO
from tests.hostile.fronts import Front, front_before

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("kind", ["nginx", "haproxy"])
def test_behind_a_proxy_without_keys_nothing_is_answered_but_that_a_key_is_needed(
    running_explorer: Run, double: EngineDouble, tmp_path: Path, kind: Front
) -> None:
    explorer = running_explorer(double)
    with front_before(explorer.url, kind, tmp_path, forwards=True) as url, httpx.Client(base_url=url) as stranger:
        for method, path in (("POST", CHAT), ("GET", CHAT), ("GET", "/metrics"), ("GET", "/ui"), ("POST", "/feedback")):
            answer = stranger.request(method, path, json=HELLO)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "proxied_without_keys"), path
            assert "tuneloop keys create" in answer.text
        assert stranger.get("/health/ready").status_code == 200
    assert explorer.chat().status_code == 200
