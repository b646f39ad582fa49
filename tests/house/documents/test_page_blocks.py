"""Every block of code of the documentation is tried: settings here, Python and commands where this table says."""

import json
import re
from pathlib import Path

import pytest
import yaml
from page_files import PAGES, ROOT, Block, blocks_of

from tuneloop.shared.settings.loader import read_settings

BLOCKS = [block for page in PAGES for block in blocks_of(page)]

#: The test that runs a page's Python, and its JavaScript, or a part of it: others run the rest.
RUN_BY = {
    "README.md": "tests/documents/test_python.py",
    "docs/architectures.md": "tests/trainer/models/test_families.py",
    "docs/clients.md": "tests/clients/test_docs.py",
    "docs/files.md": "tests/cli/data/test_data_page.py",
    "docs/giving_feedback.md": "tests/runner/test_docs.py",
    "docs/keys.md": "tests/explorer/ui/browser/test_browser.py",
    "docs/limits.md": "tests/documents/test_python.py",
    "docs/own_model.md": "tests/documents/test_python.py",
    "docs/quick_start.md": "tests/documents/test_python.py",
    "docs/shadow.md": "tests/runner/shadow/test_shadow_docs.py",
    "docs/tune.md": "tests/runner/tuning/test_views.py",
    "docs/versions.md": "tests/runner/collection/test_collect_page.py",
    "runner/README.md": "tests/runner/test_distribution.py",
}

#: The shell's commands that are tried, by their beginning, and the test that does it.
TRIED = {
    "tuneloop ": "tests/documents/test_shell.py",
    "curl ": "tests/documents/test_shell.py",
    "make ": "tests/house/documents/test_page_blocks.py",
    "pip install ": "tests/house/documents/test_extras.py",
    "python -m tuneloop.runner tasks ": "tests/runner/tasks/test_tasks_page.py",
    "python -m tuneloop.runner shadow ": "tests/runner/shadow/test_shadow_process.py",
    "python -m examples.math_agent.main": "tests/examples/agents/test_examples_page.py",
    "python -m examples.email_search.main": "tests/examples/agents/test_examples_page.py",
    "python -m examples.production_feedback.main": "tests/examples/agents/test_examples_page.py",
    "python -m examples.shadow.main": "tests/examples/agents/test_examples_page.py",
    ".venv/bin/python -m examples.tasks": "tests/examples/test_tasks.py",
    "python -m examples.flywheel.main": "tests/examples/test_flywheel.py",
}

#: What no test can run, by its beginning, and why.
NOT_RUN = {
    "git clone ": "it needs the repository's address",
    "python3 -m venv ": "tests/install makes environments, of wheels",
    "hf download ": "it needs Hugging Face",
    "ray start ": "it needs several machines with GPUs",
    "useradd ": "it changes the machine",
    "install -D ": "it changes the machine",
    "cp deploy/systemd/": "it changes the machine; tests/house/test_units.py checks the units",
    "systemctl ": "it needs systemd",
    "journalctl ": "it needs systemd",
    "TUNELOOP_ENGINE_PACKS=1 vllm serve ": "it needs a GPU: tests/loop/on_vllm/packing starts such an engine",
    "docker ": "it needs Docker: tests/deploy starts the commands of the compose file",
    "kubectl ": "it needs a cluster: tests/deploy renders and checks what is applied",
    "cd deploy/compose": "tests/deploy/test_compose.py starts what is there",
    "cp .env.example .env": "tests/deploy/test_files.py compares it with what compose.yaml asks for",
    "chmod 600 .env": "the same",
    "export ANTHROPIC_": "tests/clients/test_agents.py starts Claude Code so",
    "promtool ": "tests/deploy/test_monitoring.py runs it",
    "/run/secrets/": "where the command before writes to: tests/deploy/test_compose.py",
}


def commands_of(block: Block) -> list[str]:
    """The commands of a block of shell, one each, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    commands = [re.sub(r"(^|\s)#.*$", "", line).strip() for line in lines]
    return [part.strip() for command in commands if command for part in re.split(r" && | > ", command)]


def shell_blocks() -> list[Block]:
    return [block for block in BLOCKS if block.language == "sh" and not block.text.startswith("#!")]


def test_there_are_blocks_of_known_languages_only() -> None:
    assert {block.language for block in BLOCKS} == {"", "js", "json", "python", "sh", "yaml"}
    code = [
        str(block)
        for block in BLOCKS
        if not block.language and re.match(r"(\$|tuneloop |curl |import |from )", block.text)
    ]
    assert code == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in {"python", "js"}], ids=str)
def test_its_page_is_run(block: Block) -> None:
    test = ROOT / RUN_BY[block.page]
    assert Path(block.page).name in test.read_text(), f"{RUN_BY[block.page]} does not name {block.page}"


@pytest.mark.parametrize("block", shell_blocks(), ids=str)
def test_its_commands_are_tried_or_cannot_be(block: Block) -> None:
    for command in commands_of(block):
        known = [begin for begin in {**TRIED, **NOT_RUN} if f"{command} ".startswith(begin)]
        plain = re.fullmatch(r"cd tuneloop|\. \.venv/bin/activate|tuneloop\.schema\.json", command)
        assert known or plain, f"{block}: nothing says what tries: {command}"


def test_the_tables_name_nothing_that_is_gone() -> None:
    pages = {block.page for block in BLOCKS if block.language in {"python", "js"}}
    assert set(RUN_BY) <= pages
    commands = [f"{command} " for block in shell_blocks() for command in commands_of(block)]
    assert [begin for begin in {**TRIED, **NOT_RUN} if not any(each.startswith(begin) for each in commands)] == []
    assert [test for test in {*RUN_BY.values(), *TRIED.values()} if not (ROOT / test).is_file()] == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_its_settings_are_settings(block: Block, tmp_path: Path) -> None:
    """A part of a file is completed by a model, and by what the rest of the part asks for."""
    settings = yaml.safe_load(block.text)
    if settings is None:
        assert block.text.startswith("# yaml-language-server:")
        return
    settings.setdefault("model", {"model_path": "m"})
    (tmp_path / "tuneloop.yaml").write_text(yaml.safe_dump(settings))
    assert read_settings(tmp_path / "tuneloop.yaml", environment={}).problems == ()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "json"], ids=str)
def test_its_json_is_json(block: Block) -> None:
    try:
        json.loads(block.text)
    except json.JSONDecodeError:
        for line in block.text.splitlines():
            json.loads(line)


def test_what_openai_python_posts_is_read_as_an_object() -> None:
    """With `cast_to=dict` openai-python 2.x stores the feedback, and fails."""
    told = [kind for block in BLOCKS for kind in re.findall(r"cast_to=(\w+)", block.text)]
    assert set(told) == {"object"}


def test_make_has_the_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        command.split()[1] for block in shell_blocks() for command in commands_of(block) if command.startswith("make ")
    }
    assert {"demo", "test"} <= named <= targets
