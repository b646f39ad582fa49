"""Tasks made of exchanges: what is one task, what is left out, what is right."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.runner.logs.writing import ANSWER, CALL, USER, write_lines
from tuneloop.runner.errors import LogRefused
from tuneloop.runner.logs.exchange import LoggedExchange
from tuneloop.runner.tasks.task_set import (
    ImportedTask,
    all_of,
    asks,
    between,
    by_model,
    offers_tools,
    read_tasks,
    tasks_of,
    turns,
    with_reward,
    write_tasks,
)

CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
BACK = {"role": "tool", "content": "Berlin", "tool_call_id": "c1"}


def logged(*messages: dict[str, Any], reply: dict[str, Any] = ANSWER, **but: Any) -> LoggedExchange:
    fields: dict[str, Any] = {"source": "openai", "place": "log.jsonl", "exchange_id": "1", "conversation": "c"}
    return LoggedExchange(**fields | {"messages": messages or (USER,), "reply": (reply,) if reply else ()} | but)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_calls_on_the_way_to_one_answer_are_one_task() -> None:
    later = {**CALLED, "tool_calls": [{**CALL, "id": "another-id"}]}
    first, second = logged(USER, reply=CALLED), logged(USER, later, BACK, exchange_id="2", reward=1.0)
    [task], counts = tasks_of([first, second], trust=1.0)
    assert (task.question, task.messages) == ("Where is my parcel?", (USER,))
    assert (task.answer, task.reward) == ("On its way.", 1.0)
    assert task.expected_calls == ({"name": "track", "arguments": {"number": 7}},)
    assert task.provenance["ids"] == ["1", "2"]
    assert task.provenance["place"] == "log.jsonl"
    assert (counts.read, counts.tasks) == (2, 1)


def test_each_question_of_a_conversation_is_one() -> None:
    more = (USER, ANSWER, user("When?"))
    tasks, _ = tasks_of([logged(), logged(*more, exchange_id="2")])
    assert [(each.question, len(each.messages)) for each in tasks] == [("Where is my parcel?", 1), ("When?", 3)]


def test_what_a_model_said_is_no_answer_until_somebody_says_so() -> None:
    [task], _ = tasks_of([logged()])
    assert (task.answer, task.reply) == (None, "On its way.")
    assert tasks_of([logged(reward=0.5)], trust=0.8)[0][0].answer is None
    assert tasks_of([logged(reward=0.9)], trust=0.8)[0][0].answer == "On its way."
    assert tasks_of([logged(target=True)])[0][0].answer == "On its way."


def test_one_no_keeps_out_the_whole_conversation() -> None:
    said_no = logged(USER, ANSWER, user("When?"), train=False, exchange_id="2")
    tasks, counts = tasks_of([logged(), said_no, logged(conversation="other", exchange_id="3")])
    assert [each.provenance["ids"] for each in tasks] == [["3"]]
    assert counts.opted_out == 2
    assert len(tasks_of([logged(), said_no], include_opted_out=True)[0]) == 2


def test_what_asks_nothing_is_counted() -> None:
    _, counts = tasks_of([logged({"role": "system", "content": "x"}), logged(user("  "))])
    assert (counts.without_question, counts.tasks) == (2, 0)


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (with_reward(0.5), "b"),
        (with_reward(most=0.0), "a"),
        (between(since=10.0), "b"),
        (between(until=10.0), "a"),
        (by_model("tiny"), "ab"),
        (asks("PARCEL"), "ab"),
        (turns(1), "ab"),
        (offers_tools(), "b"),
        (offers_tools("track"), "b"),
        (offers_tools("delete"), ""),
        (all_of(with_reward(), between(until=10.0)), "a"),
    ],
)
def test_filters_compose(keep: Any, kept: str) -> None:
    tools = ({"type": "function", "function": {"name": "track"}},)
    a = logged(conversation="a", reward=0.0, at=5.0, model="tiny", user="ann", exchange_id="a")
    b = logged(conversation="b", reward=1.0, at=15.0, model="tiny@3", tools=tools, exchange_id="b")
    tasks, counts = tasks_of([a, b], keep=keep)
    assert "".join(each.provenance["ids"][0] for each in tasks) == kept
    assert counts.filtered == 2 - len(kept)


def test_a_file_of_tasks_is_read_as_it_was_written(tmp_path: Path) -> None:
    tasks, _ = tasks_of([logged(target=True, user="ann", at=5.0, model="m"), logged(user("When?"), conversation="d")])
    assert write_tasks(tmp_path / "tasks.jsonl", tasks) == 2
    assert [each.to_dict() for each in read_tasks(tmp_path / "tasks.jsonl")] == [each.to_dict() for each in tasks]
    with pytest.raises(ValueError, match="two tasks"):
        write_tasks(tmp_path / "twice.jsonl", [tasks[0], tasks[0]])


def test_a_task_is_named_the_same_when_it_is_imported_again() -> None:
    names = [tasks_of([logged()])[0][0].task_id for _ in range(2)]
    assert names[0] == names[1]
    assert names[0] != tasks_of([logged(conversation="d")])[0][0].task_id


def test_rows_of_others_are_tasks_if_they_ask_something(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "t.jsonl", [{"question": "2+2?", "answer": "4"}, {"prompt": "x"}])
    reading = read_tasks(file)
    assert next(reading).messages == (user("2+2?"),)
    with pytest.raises(LogRefused, match=r"t\.jsonl:2: a task needs a question"):
        next(reading)
    assert isinstance(ImportedTask.from_dict({"question": "x"}).task_id, str)


def test_a_file_of_tasks_is_its_owners_and_on_disk_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, synced = tmp_path / "tasks.jsonl", list[str]()
    (tmp_path / "tasks.jsonl.part").write_text("of another")
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).read_text())
        assert not file.exists()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_tasks(file, [ImportedTask(task_id="1", question="q", messages=())])
    assert file.stat().st_mode & 0o077 == 0
    assert synced == [file.read_text()]
