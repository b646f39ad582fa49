"""uvicorn's private methods, which the fast routes use: where they differ, the explorer does not start."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tuneloop.explorer import __main__
from tuneloop.explorer.http import server
from tuneloop.explorer.http.server import UVICORN, check_uvicorn
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.loader import load_settings


class Older:
    """As uvicorn 0.44 has it: without the method that starts a response."""

    _should_upgrade = HttpToolsProtocol._should_upgrade
    _unset_keepalive_if_required = HttpToolsProtocol._unset_keepalive_if_required
    send_400_response = HttpToolsProtocol.send_400_response


class Newer(HttpToolsProtocol):
    """As a later version may be."""

    def _start_asgi_task(self, cycle: Any) -> None:  # type: ignore[override]
        pass


def test_the_installed_one_is_fine() -> None:
    check_uvicorn()


@pytest.mark.parametrize(
    ("protocol", "what"),
    [(Older, r"Older\._start_asgi_task is missing"), (Newer, r"Newer\._start_asgi_task has other parameters")],
)
def test_other_private_methods_are_refused_and_the_right_version_is_named(protocol: type[Any], what: str) -> None:
    with pytest.raises(EnvironmentRefused, match=rf"^uvicorn \d+\.\d+\.\d+ is installed, whose {what}: ") as caught:
        check_uvicorn(protocol)
    assert str(caught.value).endswith(f"pip install '{UVICORN}'")


def test_the_explorer_checks_before_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(server._PRIVATE_METHODS, "_begin", ("self",))
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({"mode": "serve", "model": {"model_path": "/nowhere"}}))
    with pytest.raises(EnvironmentRefused, match=r"HttpToolsProtocol\._begin is missing"):
        __main__.serve(load_settings(tmp_path / "settings.yaml"))
