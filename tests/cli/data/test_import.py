import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from tests.cli.data.exporting import ANSWER, ASKED, CALLS, TOOLS, about, asked
from tests.cli.test_main import settings_file, tuneloop
from tests.databases import put_file
from tests.factories import experience, leased, trained
from tests.factories import feedback as event
from tuneloop.cli.exports import ExportRequest, Format, export
from tuneloop.cli.files import RowLocation
from tuneloop.cli.imports import ImportResult, import_file, parse_row
from tuneloop.shared.errors import FileRefused, LedgerUnavailable
from tuneloop.shared.experience import Kind, pack_ids, pack_logprobs
from tuneloop.shared.ledger.export import Selection
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording.recording import Recording
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.ledger.storage.schema import exchanges, experiences, feedback

ACME = Selection("acme")


@pytest.fixture(params=["rows.jsonl", "rows.parquet"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Ledger]:
    url = f"sqlite:///{tmp_path}/source.db"
    put_file(url)
    engine = database.connect(url)
    yield Ledger(engine)
    engine.dispose()


def table(ledger: Ledger, which: Any, *without: str) -> list[dict[str, Any]]:
    with ledger.transactions.engine.connect() as connection:
        rows = connection.execute(select(which).order_by(which.c.id if "id" in which.c else which.c.msg_id))
        return [{name: value for name, value in row._mapping.items() if name not in without} for row in rows]


def everything(ledger: Ledger) -> tuple[list[dict[str, Any]], ...]:
    of_experiences = table(ledger, experiences, "id", "reward_rule", "group_id", "committed_at")
    return of_experiences, table(ledger, exchanges), table(ledger, feedback, "id", "outcome")


def moved(source: Ledger, file: Path, ledger: Ledger) -> ImportResult:
    export(source, ExportRequest(Format.EXPERIENCES, ACME), file)
    return import_file(ledger, file)


def varied() -> list[Any]:
    """Exchanges and feedback of every kind, with numbers that show any rounding."""
    odd = np.array([-1e-45, -0.1, -3.4e38, -0.30000001192092896], "<f4")
    first = asked(
        "Gr\N{LATIN SMALL LETTER U WITH DIAERESIS}\N{LATIN SMALL LETTER SHARP S}e \N{GRINNING FACE}\n",
        completion_ids=pack_ids([0, 1, 151_000, (1 << 31) - 1]),
        logprobs=pack_logprobs(odd.tolist()),
        user="ann",
        task_id="t",
        run_id="r",
        priority=0.1,
        latency_s=1 / 3,
        tool_calls=json.dumps(CALLS, separators=(",", ":")).encode(),
    )
    second = asked("Other.", request={"messages": ASKED, "tools": TOOLS}, temperature=0.7, unsampled="sampling:top_p")
    broken = asked("Cut", drop_reason="cut_off", finish_reason=None)
    unknown = asked("No feedback.", completion_ids=b"", logprobs=b"", prompt_ids=b"", drop_reason="no_token_ids")
    said = [
        about(first, value=0.1, occurred_at=2.0, source="judge"),
        about(first, Kind.BOOLEAN, metric="thumb", value=0.0),
        about(first, Kind.DEMONSTRATION, text="Better."),
        about(first, Kind.COMMENT, text="Hm."),
        about(first, Kind.PREFERENCE, worse=second, metric="choice"),
        event(msg_id=None, task_id="t", run_id="r", value=0.9),
        about(broken, value=0.5),
        about(second, Kind.LABEL, text="rude", metric="label"),
        about(second, value=1.0),
        about(second, Kind.RETRACTION),
    ]
    return [first, second, broken, unknown, *said]


def test_an_empty_ledger_has_the_same_rows_afterwards(source: Ledger, file: Path, ledger: Ledger) -> None:
    source.recording.record(varied())
    assert moved(source, file, ledger) == ImportResult(4, 4, 0)
    assert [sorted(map(str, rows)) for rows in everything(ledger)] == [
        sorted(map(str, rows)) for rows in everything(source)
    ]


def test_every_choice_of_a_reply_comes(source: Ledger, file: Path, ledger: Ledger) -> None:
    said = asked(experiences=tuple(experience(choice=number) for number in range(3)))
    source.recording.record([said, about(said, choice=1, value=0.5), about(said, choice=2, value=-0.5)])
    assert moved(source, file, ledger).new == 3
    assert [row["reward"] for row in everything(ledger)[0]] == [None, 0.5, -0.5]


def test_a_file_that_is_imported_again_changes_nothing(source: Ledger, file: Path, ledger: Ledger) -> None:
    source.recording.record(varied())
    moved(source, file, ledger)
    ledger.recording.commit("acme")
    before = everything(ledger)
    assert import_file(ledger, file) == ImportResult(4, 0, 0)
    assert everything(ledger) == before


def test_leased_and_trained_rows_come_in_as_rewarded(source: Ledger, file: Path, ledger: Ledger) -> None:
    trained(source, 2)
    leased(source, 1)
    assert moved(source, file, ledger) == ImportResult(3, 3, 0)
    assert {row["state"] for row in everything(ledger)[0]} == {"rewarded"}
    assert ledger.reports.imbalance() == []


def test_rewards_are_reckoned_by_the_rule_of_the_ledger_and_differences_are_told(
    source: Ledger, file: Path, ledger: Ledger
) -> None:
    said = [asked(), asked()]
    source.recording.record([*said, about(said[0], value=0.5), about(said[1], value=0.5)])
    other = Ledger(ledger.transactions.engine, rule=ledger.rewards.rule.model_copy(update={"clip": (0.0, 0.25)}))
    assert moved(source, file, other) == ImportResult(2, 2, 2)
    assert [row["reward"] for row in everything(other)[0]] == [0.25, 0.25]


def test_plain_conversations_are_examples_for_sft(lines: Path, ledger: Ledger, tmp_path: Path) -> None:
    rows = [{"messages": [*ASKED, ANSWER]}, {"messages": [ASKED[1], ANSWER | {"tool_calls": CALLS}], "tools": TOOLS}]
    lines.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert import_file(ledger, lines, tenant="acme") == ImportResult(2, 2, 0)
    assert import_file(ledger, lines, tenant="acme") == ImportResult(2, 0, 0)
    states = [(row["state"], row["reason"]) for row in everything(ledger)[0]]
    assert states == [("dropped", "imported: no token ids")] * 2
    out = tmp_path / "out.jsonl"
    export(ledger, ExportRequest(Format.SFT, ACME), out)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["messages"] for row in found] == [row["messages"] for row in rows]
    assert [row["tools"] for row in found] == [None, TOOLS]


def test_who_was_erased_does_not_come_back(source: Ledger, file: Path, ledger: Ledger) -> None:
    said = [asked("Said.", user=user) for user in ("ann", "bob", "ann")]
    source.recording.record(said)
    export(source, ExportRequest(Format.SFT, ACME, everything=True), file)
    ledger.retention.erase("acme", "ann")
    assert import_file(ledger, file, tenant="acme") == ImportResult(3, 1, 0, refused=2)
    assert import_file(ledger, file, tenant="acme") == ImportResult(3, 0, 0, refused=2)
    assert [row["user_id"] for row in table(ledger, exchanges)] == ["bob"]
    file.unlink()
    assert moved(source, file, ledger) == ImportResult(3, 0, 0, refused=2)


def test_an_exported_conversation_of_parquet_is_one_again(source: Ledger, tmp_path: Path, ledger: Ledger) -> None:
    said = asked("", request={"messages": ASKED, "tools": TOOLS}, tool_calls=json.dumps(CALLS).encode())
    source.recording.record([said, about(said)])
    file = tmp_path / "sft.parquet"
    export(source, ExportRequest(Format.SFT, ACME), file)
    import_file(ledger, file, tenant="acme")
    [page] = ledger.exports.replies(ACME)
    assert [json.loads(each.request) for each in page] == [{"messages": ASKED, "tools": TOOLS}]
    assert [(each.msg_id, json.loads(each.tool_calls or b"")) for each in page] == [(said.msg_id, CALLS)]


def exported_line(source: Ledger, file: Path, **but: Any) -> str:
    said = asked()
    source.recording.record([said, about(said)])
    export(source, ExportRequest(Format.EXPERIENCES, ACME), file)
    return json.dumps(json.loads(file.read_text().splitlines()[-1]) | but)


@pytest.mark.parametrize(
    ("but", "wrong"),
    [
        ({"completion_ids": [1]}, "1 completion_ids, 2 logprobs"),
        ({"completion_ids": [-2, 2]}, r"\$\.completion_ids"),
        ({"msg_id": "x" * 97}, r"\$\.msg_id"),
        ({"state": "unheard of"}, r"\$\.state"),
        ({"version_min": 3}, "version_min is greater"),
        ({"reward": "high"}, r"\$\.reward"),
        ({"feedback": [{"event_id": "e"}]}, r"\$\.feedback\[0\]"),
        ({"prompt_ids": None}, "prompt_ids"),
        ({"completion_ids": None}, "the last of the messages must be the assistant's"),
        ({"request": '{"messages": ['}, "request is not JSON"),
        ({"request": "[" * 500 + "]" * 500}, "request is not JSON"),
        ({"tool_calls": "[{"}, "tool_calls is not JSON"),
        ({"tool_calls": "{}"}, "tool_calls must be a list"),
    ],
)
def test_a_bad_row_is_told_with_its_line_and_nothing_is_taken(
    source: Ledger, lines: Path, ledger: Ledger, but: dict[str, Any], wrong: str
) -> None:
    good, bad = exported_line(source, lines), exported_line(source, lines, **but)
    lines.write_text(f"{good}\n\n{bad}\n")
    with pytest.raises(FileRefused, match=f"(?s)^{lines}:3: .*{wrong}.*\n{lines}: nothing was imported$"):
        import_file(ledger, lines)
    assert everything(ledger) == ([], [], [])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e308])
@pytest.mark.parametrize("name", ["sampled_at", "priority", "value", "received_at", "occurred_at"])
def test_numbers_that_nothing_can_reckon_with_are_refused(source: Ledger, lines: Path, name: str, value: float) -> None:
    """Parquet holds them, unlike JSON."""
    row = json.loads(exported_line(source, lines))
    (row if name in row else row["feedback"][0])[name] = value
    with pytest.raises(ValueError, match=name):
        parse_row(RowLocation("x.parquet:1", row, ""), tenant="acme", now=0.0)


@pytest.mark.parametrize(
    "bad", ["{", "[]", "1", '{"text": "x"}', '{"messages": []}', "\N{GRINNING FACE}", '{"a": NaN}']
)
def test_what_is_no_row_is_told(lines: Path, ledger: Ledger, bad: str) -> None:
    lines.write_text(bad)
    with pytest.raises(FileRefused, match=f"^{lines}:1: "):
        import_file(ledger, lines)


class Failing(Recording):
    pages = 1

    def record(self, records: Any) -> None:
        if not self.pages:
            raise LedgerUnavailable("the server is gone")
        self.pages -= 1
        super().record(records)


def test_a_ledger_that_goes_away_says_how_far_it_came(source: Ledger, lines: Path, ledger: Ledger) -> None:
    source.recording.record([asked() for _ in range(501)])
    away = Ledger(ledger.transactions.engine)
    away.recording = Failing(away.transactions, away.rewards)
    with pytest.raises(FileRefused, match="the server is gone\nThe first 500 rows are in"):
        moved(source, lines, away)
    assert import_file(ledger, lines) == ImportResult(501, 1, 0)


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "rows.csv", "bad.parquet"])
def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path: Path, ledger: Ledger, name: str) -> None:
    (tmp_path / "bad.parquet").write_text("no Parquet")
    with pytest.raises(FileRefused, match=f"{tmp_path / name}: "):
        import_file(ledger, tmp_path / name)


def test_the_commands_move_rows_from_one_experiment_to_another(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    file = first / "rows.jsonl"
    file.write_text(json.dumps({"messages": [*ASKED, ANSWER], "user": "ann"}) + "\n")
    config, out = settings_file(first), first / "out.parquet"
    assert tuneloop("export", "-c", config, "--format", "sft", "--to", out)[::2] == (
        3,
        "the database is empty: nothing has been recorded with these settings\n",
    )
    assert tuneloop("import", "-c", config, file) == (0, f"{file}: 1 rows, 1 of them new\n", "")
    flags = ("--since", "2000-01-01", "--state", "dropped", "--format", "experiences", "--to", out)
    assert tuneloop("export", "-c", config, *flags) == (0, f"{out}: 1 rows\n", "")
    assert tuneloop("import", "-c", settings_file(second), out) == (0, f"{out}: 1 rows, 1 of them new\n", "")
    code, said, _ = tuneloop("export", "-c", config, "--format", "kto", "--to", out)
    assert (code, said) == (0, f"{out}: 0 rows\n  left out 1: no thumbs\n")
