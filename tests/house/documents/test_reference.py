"""What the reference pages take from the code is what the code says."""

import importlib.util
import inspect
import re
from types import ModuleType

import pytest
from page_files import DOCS, ROOT, part_below

from tuneloop import runner
from tuneloop.explorer.engines.fleet import EngineState
from tuneloop.explorer.processes.ledger_gauges import KEY_CHANGED, REFUSED
from tuneloop.explorer.proxy.request import BEYOND_IDS, NEUTRAL
from tuneloop.explorer.versions import attestation, loading
from tuneloop.shared.experience import Outcome, State, VersionState
from tuneloop.shared.ledger.storage.clock import CLOCK_SKEW
from tuneloop.shared.ledger.storage.schema import metadata
from tuneloop.shared.operations.diagnosis import CAPTURE_MISMATCH, DISK_FULL, OF_TRAINERS, STOPS, TRAINER_SILENT
from tuneloop.shared.operations.older_ledger import LEDGER_OLDER
from tuneloop.shared.settings.serving import ModelSettings
from tuneloop.trainer.monitoring import monitors
from tuneloop.trainer.monitoring.drift import RULES
from tuneloop.trainer.teacher import teacher


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    place = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


def test_the_pages_are_those_that_are_generated(reference: ModuleType) -> None:
    """Changed a route, an option or a metric? `python scripts/reference.py --write`."""
    assert [path.name for path, text in reference.pages().items() if path.read_text() != text] == []


def test_a_table_is_written_without_what_a_reader_does_not_see(reference: ModuleType) -> None:
    page = "| a | b |\n|---|:--|\n| x \\| y | |\n\n```\n| a |\n```\n"
    assert reference.with_compact_tables(page) == "|a|b|\n|-|:-|\n|x \\| y||\n\n```\n| a |\n```\n"


def test_a_metric_without_a_row_is_refused(reference: ModuleType) -> None:
    page = "|`a_b`|x|`1`|Means this.|\n"
    assert reference.with_columns(page, {"a_b": "gauge|`2`"}) == "|`a_b`|gauge|`2`|Means this.|\n"
    with pytest.raises(ValueError, match="a_c"):
        reference.with_columns(page, {"a_b": "gauge|`2`", "a_c": "x|`y`"})


def test_a_table_of_options_is_what_their_docstrings_say(reference: ModuleType) -> None:
    head = "<!-- options: a -->\n|Option|Type|Default|Meaning|\n|-|-|-|-|\n"
    page = head + "|`a.gone`|x|`1`|Of an older release.|\n\nMore.\n"
    assert reference.with_options(page, {"a.b": "integer|`2`|New."}) == (head + "|`a.b`|integer|`2`|New.|\n\nMore.\n")
    with pytest.raises(ValueError, match=r"c\.d"):
        reference.with_options(page, {"a.b": "integer|`2`|New.", "c.d": "x|`y`|Z."})
    marked = page.replace("options: a", "options: a (Train)")
    assert "|A. _Serve_ B.|" in reference.with_options(marked, {"a.b": "x|`y`|A. _Serve_ B. _Train._"})
    field = ModelSettings.model_fields["trust_remote_code"]
    assert field.description
    assert f"|{field.description}|" in (DOCS / "settings.md").read_text()


def test_every_state_is_on_its_page() -> None:
    concepts, feedback = ((DOCS / page).read_text() for page in ("concepts.md", "feedback.md"))
    assert [each for each in (*State, *VersionState, *EngineState) if f"|`{each}`|" not in concepts] == []
    assert [each for each in Outcome if f"|`{each}`|" not in feedback] == []


def test_every_table_of_the_database_that_has_something_of_people_is_told() -> None:
    """A new table: does it hold what somebody wrote, or who it was? Then it is a row of privacy.md."""
    without = {
        *("alarms", "epochs", "evaluations", "experience_counts", "experiment", "explorers", "mismatches"),
        *("outbox_files", "reward_rules", "shared_counts", "version_events", "versions"),
    }
    page = part_below((DOCS / "privacy.md").read_text(), "What is kept where")
    told = {name for row in re.findall(r"^\|(.*?)\|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    told |= set(re.findall(r"table `(\w+)`", page))
    assert told == metadata.tables.keys() - without


def test_why_a_reply_is_no_sample_is_told_parameter_by_parameter() -> None:
    page = (DOCS / "explain.md").read_text().partition("## Sampled otherwise")[2]
    names = {name.partition("_")[0] + "_…" if name.startswith("guided_") else name for name in NEUTRAL}
    names |= {f"sampling:{name}" for name in BEYOND_IDS}
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_every_alarm_is_on_its_page() -> None:
    of_explorers = {attestation.ALARM, loading.DAMAGED, loading.UNREADABLE, LEDGER_OLDER, REFUSED, CLOCK_SKEW}
    of_trainers = {teacher._AWAY, monitors.NOT_FINITE, DISK_FULL, CAPTURE_MISMATCH, *OF_TRAINERS}
    alarms = of_explorers | {KEY_CHANGED, *STOPS, TRAINER_SILENT} | of_trainers
    page = (DOCS / "troubleshooting.md").read_text()
    assert _first_column(page, "|alarm|") == alarms
    assert _first_column(page, "|monitor|") == RULES.keys()


def _first_column(page: str, head: str) -> set[str]:
    table = page.partition(head)[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_option_of_tune_is_on_its_page() -> None:
    """With its default, but for those that are resolved later: None in the signature."""
    page = part_below((DOCS / "settings.md").read_text(), "Options of tune()")
    rows = {
        name: default.strip("`")
        for names, defaults in re.findall(r"^\|(`\w+`(?:, `\w+`)*)\|([^|]*)\|", page, re.MULTILINE)
        for name, default in zip(
            re.findall(r"\w+", names), [each.strip() for each in defaults.split(",")] * 2, strict=False
        )
    }
    options = inspect.signature(runner.tune).parameters
    assert rows.keys() == options.keys()
    fixed = {
        name: each.default for name, each in options.items() if each.default not in {None, inspect.Parameter.empty}
    }
    assert {name: rows[name] for name in fixed} == {
        name: f"{each:g}" if type(each) in {int, float} else str(each) for name, each in fixed.items()
    }
