"""What is used of uvicorn's internals: where it is missing, the explorer does not start."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tuneloop.explorer import __main__, protocol
from tuneloop.explorer.protocol import UVICORN, check_uvicorn
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.loader import load_settings

pytestmark = pytest.mark.contract


class OtherMethods(HttpToolsProtocol):
    """As a later version may be."""

    def _should_upgrade(self, offer: bytes) -> bool:  # type: ignore[override]
        return bool(offer)


class OtherState:
    """A cycle as a later version may be."""

    def __init__(self) -> None:
        self.more_body = self.keep_alive = self.response_started = self.response_complete = self.disconnected = False
        self.message_event = self.on_response = self.expected_content_length = None


def test_the_installed_one_is_fine() -> None:
    check_uvicorn()


@pytest.mark.parametrize(
    ("other", "lacks"), [({"protocol": OtherMethods}, "_should_upgrade"), ({"cycle": OtherState}, "chunked_encoding")]
)
def test_a_release_that_lacks_something_is_refused_and_the_right_one_is_named(other: Any, lacks: str) -> None:
    with pytest.raises(EnvironmentRefused, match=rf"^uvicorn \d+\.\d+\.\d+ is installed, which lacks {lacks} ") as told:
        check_uvicorn(**other)
    assert str(told.value).endswith(f"pip install '{UVICORN}'")


def test_the_explorer_checks_before_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(protocol._PRIVATE_METHODS, "_begin", ("self",))
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({"mode": "serve", "model": {"model_path": "/nowhere"}}))
    with pytest.raises(EnvironmentRefused, match="lacks _begin"):
        __main__.serve(load_settings(tmp_path / "settings.yaml"))
