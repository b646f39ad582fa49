"""Without keys, a real proxy on the same machine lets no stranger in."""

from pathlib import Path

import httpx
import pytest

from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.running import HELLO
from tests.hostile.fronts import front_before

pytestmark = pytest.mark.contract


def test_behind_nginx_without_keys_nothing_is_answered_but_that_a_key_is_needed(
    running_explorer: Run, double: EngineDouble, tmp_path: Path
) -> None:
    explorer = running_explorer(double)
    adds = "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;"
    with front_before(explorer.url, "nginx", tmp_path, adds) as url, httpx.Client(base_url=url) as stranger:
        for method, path in (("POST", CHAT), ("GET", CHAT), ("GET", "/metrics"), ("GET", "/ui"), ("POST", "/feedback")):
            answer = stranger.request(method, path, json=HELLO)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "proxied_without_keys"), path
            assert "tuneloop keys create" in answer.text
        assert stranger.get("/health/ready").status_code == 200
    assert explorer.chat().status_code == 200
