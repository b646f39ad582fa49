import json
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, insert, select

from examples.sums.model import tokenizer
from tests.cli.data.exporting import ANSWER, ASKED, CALLS, TOOLS, about, asked, exported
from tests.factories import experience, feedback, trained
from tuneloop.cli.exports import ExportRequest, Format, export
from tuneloop.shared.errors import EnvironmentRefused, FileRefused
from tuneloop.shared.experience import Kind, State, pack_ids, pack_logprobs
from tuneloop.shared.ledger.export import Exports, Selection
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.schema import erasures, exports
from tuneloop.shared.privacy.vocabulary import Vocabulary

pytestmark = pytest.mark.contract

ACME = Selection("acme")
SFT, DPO, KTO, EXPERIENCES = Format


@pytest.fixture(params=["rows.jsonl", "rows.parquet"])
def to(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def contents(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in messages]


def test_a_rewarded_reply_is_a_conversation(ledger: Ledger, to: Path) -> None:
    said = asked(user="ann", task_id="t", run_id="r")
    ledger.recording.record([said, about(said, value=0.5, source="judge")])
    [row] = exported(ledger, to, SFT)
    assert contents(row.pop("messages")) == contents([*ASKED, ANSWER])
    assert row == {
        "tools": None,
        "reward": 0.5,
        "msg_id": said.msg_id,
        "user": "ann",
        "task_id": "t",
        "run_id": "r",
        "version": 0,
        "feedback_sources": ["judge"],
    }


def test_tools_and_tool_calls_are_in_the_conversation(ledger: Ledger, to: Path) -> None:
    said = asked("", request={"messages": ASKED, "tools": TOOLS}, tool_calls=json.dumps(CALLS).encode())
    ledger.recording.record([said, about(said)])
    [row] = exported(ledger, to, SFT)
    assert row["messages"][-1]["tool_calls"] == CALLS
    tools = row["tools"]
    assert (json.loads(tools) if to.suffix == ".parquet" else tools) == TOOLS


def test_the_last_edited_answer_is_taken_whatever_the_reward(ledger: Ledger, to: Path) -> None:
    said = asked()
    edits = [about(said, Kind.DEMONSTRATION, text=text) for text in ("First.", "Last.")]
    ledger.recording.record([said, about(said, value=-1.0), *edits])
    [row] = exported(ledger, to, SFT, min_reward=0.5)
    assert contents(row["messages"])[-1] == ("assistant", "Last.")


def test_an_edited_answer_that_is_a_message_is_one_with_its_calls(ledger: Ledger, to: Path) -> None:
    said = asked("Bad.", request={"messages": ASKED, "tools": TOOLS})
    message = {"role": "assistant", "content": None, "tool_calls": CALLS}
    ledger.recording.record([said, about(said, Kind.DEMONSTRATION, text=json.dumps(message))])
    [sft], [dpo] = exported(ledger, to, SFT), exported(ledger, to, DPO)
    for answer in (sft["messages"][-1], *dpo["chosen"]):
        assert (answer["role"], answer["content"], answer["tool_calls"]) == ("assistant", "", CALLS)


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_the_reasoning_of_an_edited_answer_is_with_it(ledger: Ledger, to: Path, key: str) -> None:
    said = asked("Bad.")
    message = {"role": "assistant", "content": "Monday.", key: "It ships on Friday."}
    ledger.recording.record([said, about(said, Kind.DEMONSTRATION, text=json.dumps(message))])
    [row] = exported(ledger, to, SFT)
    answer = row["messages"][-1]
    assert (answer["content"], answer["reasoning_content"], row["reward"]) == ("Monday.", "It ships on Friday.", None)


@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_the_reasoning_of_a_reply_is_with_it(ledger: Ledger, to: Path, opened: str) -> None:
    words = tokenizer()
    words.save_pretrained(to.parent)
    ids = words.encode(f"{opened}It ships on Friday.\n</think>\n\nMonday.<|im_end|>")
    said = asked("Monday.", completion_ids=pack_ids(ids), logprobs=pack_logprobs([-0.5] * len(ids)))
    ledger.recording.record([said, about(said)])
    [row] = exported(ledger, to, SFT, vocabulary=Vocabulary.load(to.parent))
    answer = row["messages"][-1]
    assert (answer["content"], answer["reasoning_content"]) == ("Monday.", "It ships on Friday.")


def test_an_edit_that_says_the_same_as_a_message_is_no_pair(ledger: Ledger, lines: Path) -> None:
    said = asked("Hello.")
    ledger.recording.record([said, about(said, Kind.DEMONSTRATION, text=json.dumps(ANSWER))])
    assert export(ledger, ExportRequest(DPO, ACME), lines).left_out["edited without a change"] == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"role": "user", "content": "Hi."}',
        '{"role": "assistant", "content": "Hi',
        '{"role": "assistant", "content": "\\ud800"}',
        '{"role": "assistant", "content": %s}' % ("[" * 300 + "]" * 300),
        '{"role": "assistant", "content": %s}' % ("[" * 100_000 + "]" * 100_000),
    ],
    ids=["user's", "cut off", "surrogate", "deep", "deeper"],
)
def test_an_edited_answer_that_is_no_message_is_a_text(ledger: Ledger, to: Path, text: str) -> None:
    said = asked()
    ledger.recording.record([said, about(said, Kind.DEMONSTRATION, text=text)])
    assert contents(exported(ledger, to, SFT)[0]["messages"])[-1] == ("assistant", text)


@pytest.mark.parametrize("format_", [SFT, DPO, KTO])
def test_what_raters_in_quarantine_said_is_in_no_file_to_train_on(ledger: Ledger, lines: Path, format_: Format) -> None:
    said, other = asked("Good."), asked("Bad.")
    heard = [
        about(said, Kind.BOOLEAN, source="eve"),
        about(said, Kind.DEMONSTRATION, text="Evil.", source="eve"),
        about(said, Kind.PREFERENCE, worse=other, source="eve"),
    ]
    ledger.recording.record([said, other, *heard])
    request = ExportRequest(format_, ACME)
    assert export(ledger, request, lines).rows > 0
    ledger.raters.quarantine("acme", "eve", by="ann", reason="it lies")
    assert export(ledger, request, lines).rows == 0
    assert [len(row["feedback"]) for row in exported(ledger, lines, EXPERIENCES)] == [3, 1]
    ledger.raters.release("acme", "eve", by="ann", reason="it was the cat")
    assert export(ledger, request, lines).rows > 0


def test_an_edit_that_was_taken_back_is_none(ledger: Ledger, lines: Path) -> None:
    said = asked()
    ledger.recording.record([said, about(said, Kind.DEMONSTRATION, text="No."), about(said, Kind.RETRACTION)])
    assert exported(ledger, lines, SFT) == []
    assert exported(ledger, lines, DPO) == []


def test_what_is_no_example_is_left_out_and_counted(ledger: Ledger, lines: Path) -> None:
    low, cut, mute = asked(), asked(drop_reason="cut_off", finish_reason=None), asked()
    silent, private = asked(request={"prompt": "x"}), asked(drop_reason="opt_out")
    said = [low, cut, silent, private]
    ledger.recording.record([*said, mute, *(about(each, value=0.1) for each in said)])
    done = export(ledger, ExportRequest(SFT, ACME, min_reward=0.5), lines)
    assert done.rows == 0
    assert done.left_out == {
        "too low a reward": 1,
        "cut off": 1,
        "no messages in the request": 1,
        "opted out of training": 1,
        "no reward": 1,
    }
    everything = exported(ledger, lines, SFT, everything=True)
    assert {row["msg_id"] for row in everything} == {low.msg_id, cut.msg_id, mute.msg_id}


def test_parts_of_content_are_one_text_in_parquet_and_themselves_in_json_lines(ledger: Ledger, to: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    parts = [{"type": "text", "text": "What is "}, image, {"type": "text", "text": "this?"}]
    said = asked(request={"messages": [{"role": "user", "content": parts}]})
    ledger.recording.record([said, about(said)])
    [row] = exported(ledger, to, SFT)
    found = row["messages"][0]["content"]
    assert found == ("What is this?" if to.suffix == ".parquet" else parts)


def test_a_preferred_reply_is_paired_with_the_other(ledger: Ledger, to: Path) -> None:
    good, bad = asked("Good.", user="ann"), asked("Bad.", user="bob")
    ledger.recording.record([good, bad, about(good, Kind.PREFERENCE, worse=bad, source="judge")])
    [row] = exported(ledger, to, DPO)
    assert [contents(row[name]) for name in ("prompt", "chosen", "rejected")] == [
        contents(ASKED),
        [("assistant", "Good.")],
        [("assistant", "Bad.")],
    ]
    assert (row["source"], row["feedback_sources"]) == ("preference", ["judge"])
    assert (row["msg_id"], row["other_msg_id"], row["user"], row["other_user"]) == (
        good.msg_id,
        bad.msg_id,
        "ann",
        "bob",
    )


def test_of_a_pair_the_last_preference_counts(ledger: Ledger, lines: Path) -> None:
    one, other = asked("One."), asked("Other.")
    ledger.recording.record(
        [one, other, about(one, Kind.PREFERENCE, worse=other), about(other, Kind.PREFERENCE, worse=one)]
    )
    assert [row["msg_id"] for row in exported(ledger, lines, DPO)] == [other.msg_id]
    ledger.recording.record([about(other, Kind.RETRACTION)])
    assert [row["msg_id"] for row in exported(ledger, lines, DPO) if row["source"] == "preference"] == [one.msg_id]


@pytest.mark.parametrize("request_", [{"messages": ASKED[1:]}, {"messages": ASKED, "tools": TOOLS}])
def test_replies_to_different_questions_are_no_pair(ledger: Ledger, lines: Path, request_: dict[str, Any]) -> None:
    good = asked("Good.")
    bad = asked("Bad.", request=request_, prompt_ids=pack_ids([9]))
    ledger.recording.record([good, bad, about(good, Kind.PREFERENCE, worse=bad)])
    assert export(ledger, ExportRequest(DPO, ACME), lines).left_out == {"not the same prompt": 1}


def test_an_edited_answer_is_better_than_the_reply(ledger: Ledger, to: Path) -> None:
    said = asked("Bad.", user="ann")
    ledger.recording.record([said, about(said, Kind.DEMONSTRATION, text="Good.", source="editor")])
    [row] = exported(ledger, to, DPO)
    assert (contents(row["chosen"]), contents(row["rejected"])) == ([("assistant", "Good.")], [("assistant", "Bad.")])
    assert (row["source"], row["other_msg_id"], row["feedback_sources"]) == ("demonstration", None, ["editor"])


def test_of_the_replies_to_one_prompt_the_best_is_paired_with_the_worst(ledger: Ledger, to: Path) -> None:
    texts = ["Worst.", "Best.", "Middling."]
    choices = tuple(experience(choice=number, text=text) for number, text in enumerate(texts))
    said = asked(experiences=choices)
    elsewhere = asked("Other prompt.", prompt_ids=pack_ids([7]))
    foreign = asked("Not ours.", tenant="other")
    rewards = [about(said, choice=number, value=value) for number, value in enumerate([-1.0, 1.0, 0.5])]
    others = [about(elsewhere, value=-9.0), about(foreign, value=-9.0, tenant="other")]
    ledger.recording.record([said, elsewhere, foreign, *rewards, *others])
    [row] = exported(ledger, to, DPO)
    assert (contents(row["chosen"]), contents(row["rejected"])) == ([("assistant", "Best.")], [("assistant", "Worst.")])
    assert (row["source"], row["reward"], row["other_reward"]) == ("reward", 1.0, -1.0)
    assert row["msg_id"] == row["other_msg_id"] == said.msg_id


@pytest.mark.parametrize(("margin", "pairs"), [(0.0, 1), (0.5, 1), (0.51, 0)])
def test_rewards_closer_than_the_margin_make_no_pair(ledger: Ledger, lines: Path, margin: float, pairs: int) -> None:
    one, other = asked("One."), asked("Other.")
    ledger.recording.record([one, other, about(one, value=1.0), about(other, value=0.5)])
    assert len(exported(ledger, lines, DPO, margin=margin)) == pairs


def test_thumbs_are_labels_by_the_majority_of_their_last(ledger: Ledger, to: Path) -> None:
    liked, disliked, split = asked("Liked."), asked("Disliked."), asked("Split.")

    def thumbs(said: Any, *values: float) -> list[Any]:
        return [about(said, Kind.BOOLEAN, value=each, source=str(number)) for number, each in enumerate(values)]

    changed = [about(disliked, Kind.BOOLEAN, value=1.0, source="0"), *thumbs(disliked, 0.0, 0.0, 1.0)]
    ledger.recording.record([liked, disliked, split, *thumbs(liked, 1.0), *changed, *thumbs(split, 1.0, 0.0)])
    rows = exported(ledger, to, KTO)
    assert [(contents(row["completion"]), row["label"]) for row in rows] == [
        ([("assistant", "Liked.")], True),
        ([("assistant", "Disliked.")], False),
    ]
    assert contents(rows[0]["prompt"]) == contents(ASKED)


def test_thumbs_that_were_taken_back_do_not_count(ledger: Ledger, lines: Path) -> None:
    said = asked()
    ledger.recording.record([said, about(said, Kind.BOOLEAN), about(said, Kind.RETRACTION)])
    assert export(ledger, ExportRequest(KTO, ACME), lines).left_out == {"no thumbs": 1}


def test_an_experience_is_everything_that_is_known(ledger: Ledger, to: Path) -> None:
    said = asked(user="ann", task_id="t", run_id="r", priority=2.0, latency_s=0.25)
    heard = about(said, value=0.5, source="judge", occurred_at=3.0)
    ledger.recording.record([said, heard])
    [row] = exported(ledger, to, EXPERIENCES)
    assert json.loads(row["request"]) == {"messages": ASKED}
    assert contents(row["messages"]) == contents(ASKED)
    assert json.loads(row["reward_rule"])["weights"] == {"reward": 1.0}
    assert (row["prompt_ids"], row["completion_ids"], row["logprobs"]) == ([1, 2, 3], [4, 5], [-0.5, -0.25])
    known = {name: row[name] for name in ("msg_id", "user", "task_id", "run_id", "priority", "latency_s", "state")}
    assert known == {
        "msg_id": said.msg_id,
        "user": "ann",
        "task_id": "t",
        "run_id": "r",
        "priority": 2.0,
        "latency_s": 0.25,
        "state": "rewarded",
    }
    [event] = row["feedback"]
    assert (event["event_id"], event["value"], event["source"]) == (heard.event_id, 0.5, "judge")
    assert (event["occurred_at"], event["outcome"]) == (3.0, "accepted")


def test_what_was_said_of_a_reply_goes_before_what_was_said_of_its_run(ledger: Ledger, lines: Path) -> None:
    said, run = asked(task_id="t", run_id="r"), {"msg_id": None, "task_id": "t", "run_id": "r"}
    heard = [
        about(said, Kind.BOOLEAN, value=0.0),
        about(said, Kind.DEMONSTRATION, text="Its own."),
        about(said, Kind.BOOLEAN, **run),
        about(said, Kind.BOOLEAN, source="ann", **run),
        about(said, Kind.DEMONSTRATION, text="Of the run.", **run),
    ]
    ledger.recording.record([said, *heard])
    assert contents(exported(ledger, lines, SFT)[0]["messages"])[-1] == ("assistant", "Its own.")
    assert exported(ledger, lines, KTO)[0]["label"] is False


def test_feedback_on_a_whole_run_is_with_each_of_its_replies(ledger: Ledger, lines: Path) -> None:
    said = [asked(task_id="t", run_id="r") for _ in range(2)]
    heard = feedback(msg_id=None, task_id="t", run_id="r", value=0.5)
    ledger.recording.record([*said, heard])
    rows = exported(ledger, lines, EXPERIENCES)
    assert [[event["event_id"] for event in row["feedback"]] for row in rows] == [[heard.event_id]] * 2


@pytest.mark.parametrize(
    ("but", "found"),
    [
        ({}, "abc"),
        ({"task_id": "b"}, "b"),
        ({"since": 20.0}, "bc"),
        ({"until": 20.0}, "ab"),
        ({"states": (State.RECORDED,)}, "c"),
        ({"states": (State.RECORDED, State.REWARDED)}, "abc"),
        ({"min_reward": 0.5}, "b"),
        ({"tenant": "other"}, "d"),
    ],
)
def test_a_file_holds_what_was_asked_for(ledger: Ledger, lines: Path, but: dict[str, Any], found: str) -> None:
    said = {name: asked(task_id=name, received_at=at) for name, at in (("a", 10.0), ("b", 20.0), ("c", 30.0))}
    foreign = asked(task_id="d", tenant="other")
    ledger.recording.record([*said.values(), foreign, about(said["a"], value=0.0), about(said["b"])])
    rows = exported(ledger, lines, EXPERIENCES, **but)
    assert "".join(row["task_id"] for row in rows) == found


def test_of_a_corrected_reply_the_last_reward_counts(engine: Engine, lines: Path) -> None:
    ledger = Ledger(engine, compensate_late=True)
    trained(ledger, 1)
    [before] = exported(ledger, lines, EXPERIENCES)
    ledger.recording.record([feedback(msg_id=before["msg_id"], value=-0.5, received_at=9e9)])
    assert [row["correction"] for row in exported(ledger, lines, EXPERIENCES)] == [0, 1]
    [page] = ledger.exports.replies(ACME)
    assert [(reply.correction, reply.reward) for reply in page] == [(1, -0.5)]


def test_more_rows_than_a_page_are_all_there(ledger: Ledger, to: Path) -> None:
    said = [asked() for _ in range(1203)]
    ledger.recording.record(said)
    rows = exported(ledger, to, EXPERIENCES)
    assert [row["msg_id"] for row in rows] == [each.msg_id for each in said]


def remembered(engine: Engine) -> list[tuple[str, str, int]]:
    with engine.connect() as connection:
        rows = connection.execute(select(exports.c.path, exports.c.format, exports.c.rows))
        return [tuple(row) for row in rows]


def test_the_ledger_remembers_the_file(ledger: Ledger, engine: Engine, lines: Path) -> None:
    exported(ledger, lines, EXPERIENCES)
    said = asked()
    ledger.recording.record([said, about(said)])
    exported(ledger, lines, SFT)
    assert remembered(engine) == [(str(lines), "sft", 1)]
    assert [each.name for each in lines.parent.iterdir() if each.name.startswith(".")] == []


class Erasing(Exports):
    """While the first file is being written, somebody is erased."""

    times = 1

    def record_file(self, *arguments: Any, **named: Any) -> bool:
        if self.times:
            self.times -= 1
            with self._write() as connection:
                person = {"tenant": "acme", "user_id": "ann", "erased_at": 1.0}
                connection.execute(insert(erasures), person)
        return super().record_file(*arguments, **named)


def test_a_file_is_written_anew_when_somebody_is_erased_meanwhile(engine: Engine, lines: Path) -> None:
    ledger = Ledger(engine)
    ledger.exports = Erasing(ledger.transactions)
    said = asked()
    ledger.recording.record([said, about(said)])
    assert len(exported(ledger, lines, SFT)) == 1
    assert (ledger.exports.times, len(remembered(engine))) == (0, 1)


def test_a_file_that_fails_leaves_the_old_one_and_nothing_beside_it(
    ledger: Ledger, engine: Engine, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = asked()
    ledger.recording.record([said, about(said)])
    exported(ledger, to, SFT)
    before = to.read_bytes()
    monkeypatch.setattr(Exports, "record_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(ledger, ExportRequest(SFT, ACME), to)
    assert to.read_bytes() == before
    assert [each.name for each in to.parent.iterdir() if "partial" in each.name] == []


def test_a_folder_that_is_not_there_is_a_sentence(ledger: Ledger, tmp_path: Path) -> None:
    for name in ("no/rows.jsonl", "no/rows.parquet"):
        with pytest.raises(FileRefused, match="cannot be written"):
            export(ledger, ExportRequest(SFT, ACME), tmp_path / name)
    with pytest.raises(FileRefused, match=r"must end in \.jsonl or \.parquet"):
        export(ledger, ExportRequest(SFT, ACME), tmp_path / "rows.csv")


def test_parquet_without_pyarrow_names_the_extra(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentRefused, match=r"pip install .*\[parquet\]"):
        export(ledger, ExportRequest(SFT, ACME), tmp_path / "rows.parquet")
    assert list(tmp_path.glob("*partial")) == []
    assert export(ledger, ExportRequest(SFT, ACME), tmp_path / "rows.jsonl").rows == 0
