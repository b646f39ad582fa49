"""The installed uvicorn has what the protocol uses of its internals, and pyproject.toml asks for such a one."""

import importlib.metadata
import inspect
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tuneloop.explorer import edge

pytestmark = pytest.mark.contract

#: What is overridden or called, with its parameters. `on_…` are the parser's callbacks.
METHODS = {
    "_should_upgrade": ["self"],
    "_unset_keepalive_if_required": ["self"],
    "connection_made": ["self", "transport"],
    "connection_lost": ["self", "exc"],
    "data_received": ["self", "data"],
    "on_message_begin": ["self"],
    "on_header": ["self", "name", "value"],
    "on_headers_complete": ["self"],
    "on_body": ["self", "body"],
    "on_message_complete": ["self"],
    "on_response_complete": ["self"],
    "pause_writing": ["self"],
    "resume_writing": ["self"],
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_is_used_is_there(name: str) -> None:
    assert list(inspect.signature(getattr(HttpToolsProtocol, name)).parameters) == METHODS[name]


def test_the_state_of_a_request_that_is_used_is_there() -> None:
    used = set(re.findall(r"\bcycle\.(\w+)", Path(edge.__file__).read_text()))
    assert used - {"scope", "send"} <= set(RequestResponseCycle.__init__.__code__.co_names)
    assert used > {"more_body", "disconnected"}


def test_a_connection_takes_its_app_from_where_the_protocol_puts_it() -> None:
    assert "app = self.app\n" in inspect.getsource(HttpToolsProtocol.on_headers_complete)


def test_the_installed_one_is_one_that_is_asked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    [wanted] = [each for each in map(Requirement, project["dependencies"]) if each.name == "uvicorn"]
    assert wanted.specifier.contains(importlib.metadata.version("uvicorn"))
