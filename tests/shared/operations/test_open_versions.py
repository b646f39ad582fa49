"""What `tuneloop doctor` says of versions that nobody has decided about yet."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Place
from tests.factories import trained
from tuneloop.shared.evaluation.scores import SCORE, TASKS, Figure
from tuneloop.shared.experience import Evaluator, VersionAction
from tuneloop.shared.ledger.ledger import Alarm, Ledger
from tuneloop.shared.operations.doctor import as_json, as_text, examine_experiment
from tuneloop.shared.settings.settings import Settings

SINCE = r"for \d+ s, since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"


@pytest.fixture
def options(tmp_path: Path, place: Place) -> dict[str, Any]:
    buffer = {"path": place.url, "name": place.schema or "exp_buffer"}
    return {
        "checkpoint_root_dir": tmp_path / "checkpoints",
        "model": {"model_path": "some/model"},
        "buffer": {"trainer_input": {"experience_buffer": buffer}},
        "monitor": {"evaluation": {"path": tmp_path / "tasks.jsonl"}},
    }


@pytest.fixture
def made(options: dict[str, Any], migrated_place: Place) -> Iterator[Ledger]:
    settings = Settings.model_validate(options)
    ledger = Ledger.of(settings)
    ledger.versions.ensure_base(Path("/base"))
    for _ in range(2):
        trained(ledger)
    ledger.versions.promote(1)
    yield ledger
    ledger.close()


def lines(options: dict[str, Any], gate: str | dict[str, Any] = "off", engines: int = 1) -> list[str]:
    settings = with_gate(options, gate, engines)
    page = list(as_text(examine_experiment(settings), settings))
    first = next(number for number, line in enumerate(page) if line.startswith("Versions"))
    told = page[first + 1 :]
    return [line.strip() for line in told[: next(number for number, line in enumerate(told) if line[0] != " ")]]


def with_gate(options: dict[str, Any], gate: str | dict[str, Any], engines: int) -> Settings:
    explorer = {"rollout_model": {"engine_num": engines}}
    return Settings.model_validate(options | {"gate": gate, "explorer": explorer})


def evaluated(ledger: Ledger, version: int, evaluator: Evaluator, tasks: float = 7) -> None:
    found = [Figure(TASKS, "", tasks, 0.0, 1), Figure(SCORE, "", 0.5, 0.1, 1)]
    ledger.evaluations.record(version, evaluator, found)


@pytest.mark.usefixtures("made")
def test_a_candidate_that_nothing_is_in_the_way_of_waits_for_the_explorer(options: dict[str, Any]) -> None:
    (line,) = lines(options)
    assert re.fullmatch(f"version 2 waits {SINCE}: the explorer has not loaded it yet; .*", line)


def test_where_all_is_decided_nothing_is_told(made: Ledger, options: dict[str, Any]) -> None:
    made.versions.promote(2)
    assert lines(options, "block") == []
    assert as_json(examine_experiment(Settings.model_validate(options)))["undecided"] == []


def test_the_one_that_is_tried_is_told_and_the_one_behind_it(made: Ledger, options: dict[str, Any]) -> None:
    made.versions.begin_canary(2, by="explorer", reason="rollout.mode: ab, with 0.5 of the requests")
    trained(made)
    canary, waits = lines(options)
    assert re.fullmatch(
        f"version 2 is the canary {SINCE}: by explorer: rollout.mode: ab, with 0.5 of the requests", canary
    )
    assert re.fullmatch(f"version 3 waits {SINCE}: version 2 is decided about first", waits)


def test_the_one_that_is_pinned_is_told_and_the_one_that_waits_for_its_end(
    made: Ledger, options: dict[str, Any]
) -> None:
    made.versions.pin(1, instead_of=1, by="admin:anna", reason="the demo")
    pinned, waits = lines(options)
    assert re.fullmatch(f"version 1 is pinned {SINCE}: by admin:anna: the demo", pinned)
    assert re.fullmatch(f"version 2 waits {SINCE}: version 1 is pinned", waits)
    made.versions.unpin(by="admin:anna")
    made.versions.pin(1, instead_of=1, by="admin:bert", reason="")
    assert lines(options)[0].endswith("UTC: by admin:bert"), "the last time counts"


def test_an_alarm_that_holds_is_told_of_what_waits_and_of_what_is_tried(made: Ledger, options: dict[str, Any]) -> None:
    made.alarms.raise_alarm(Alarm("entropy", "it fell", holds=False))
    assert "alarm" not in lines(options)[0]
    made.alarms.raise_alarm(Alarm("length", "replies got long", holds=True))
    (waits,) = lines(options)
    assert re.fullmatch(f"version 2 waits {SINCE}: the alarm length holds, since .* UTC", waits)
    made.versions.begin_canary(2, by="explorer", reason="a tenth")
    (canary,) = lines(options)
    assert re.fullmatch(
        f"version 2 is the canary {SINCE}: .*a tenth; not promoted while the alarm length holds, .*", canary
    )


@pytest.mark.parametrize(("engines", "evaluator"), [(1, Evaluator.TRAINER), (2, Evaluator.ENGINE)])
def test_what_the_gate_lacks_is_told(made: Ledger, options: dict[str, Any], engines: int, evaluator: Evaluator) -> None:
    def why() -> str:
        (line,) = lines(options, "block", engines)
        return line.split(" UTC: ")[1]

    assert why() == f"at the gate, until the {evaluator} has evaluated it"
    made.versions.note(2, VersionAction.EVALUATED, by="explorer", reason="waits for an engine")
    assert why() == f"at the gate, until the {evaluator} has evaluated it (waits for an engine)"
    made.versions.note(2, VersionAction.EVALUATED, by="trainer", reason="no worse", details={"passed": True})
    assert why() == f"at the gate, until the {evaluator} has evaluated it", "figures, but none of now"
    other = Evaluator.ENGINE if evaluator is Evaluator.TRAINER else Evaluator.TRAINER
    for version in (1, 2):
        evaluated(made, version, other)
    assert why().startswith(f"at the gate, until the {evaluator} has evaluated it")
    evaluated(made, 2, evaluator)
    assert why() == f"at the gate, until the {evaluator} has evaluated the champion, too"
    evaluated(made, 1, evaluator, tasks=8)
    assert why() == f"at the gate: the {evaluator} has evaluated it and the champion on different tasks"
    evaluated(made, 1, evaluator)
    assert why().startswith("the explorer has not loaded it yet")
