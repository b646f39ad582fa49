"""The pages of clients show the examples that the tests run, as they are, and name the versions that are installed."""

import json
import re

import pytest

from tests.clients.packages import EXAMPLES, PACKAGES, ROOT

pytestmark = pytest.mark.contract

DOCS = (ROOT / "docs" / "clients.md").read_text()
SHOWN = dict(re.findall(r"\((?:\.\./)examples/clients/([\w.]+)\)\n\n```\w+\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL))
FILES = sorted(file for file in EXAMPLES.iterdir() if file.suffix in {".py", ".mjs", ".sh"})
VERSION = re.compile(r"^\|[^|]+\|`([\w./@-]+)` ((?:\d[\w.]*(?:, )?)+)\|", re.MULTILINE)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_example_is_shown_as_it_is(file):
    assert SHOWN[file.name] == file.read_text()


def test_every_example_is_run():
    others = {"with_curl.sh", "with_curl_run.sh", "with_litellm_responses.py", "with_openai_agents.py"}
    assert {file.name for file in FILES} == {each.example for each in PACKAGES} - {None} | others


def test_the_versions_told_are_those_installed():
    told = {(name, version) for name, versions in VERSION.findall(DOCS) for version in versions.split(", ")}
    node = json.loads((ROOT / "tests" / "clients" / "package.json").read_text())["dependencies"].items()
    lines = [line for file in (ROOT / "tests" / "clients").glob("*.txt") for line in file.read_text().splitlines()]
    pins = {tuple(line.split("==")) for line in lines if "==" in line}
    assert len(told) >= 12
    assert told <= set(node) | pins
