"""What a reply is called, of every kind that client libraries make; the libraries' own objects: test_client_objects."""

from types import SimpleNamespace as Thing
from typing import Any

import pytest

from tuneloop.runner import WholeRun, reply_id
from tuneloop.runner.feedback.verbs import subject_of
from tuneloop.runner.models.run import Run

ID = "chatcmpl-06gvpfojv39qtg7p5hf4v7lb077k9f1ug8tl37d8"
MINE = "lc_run--01"

NAMED: list[Any] = [
    ID,
    {"id": ID, "choices": []},
    Thing(id=ID),
    Thing(id=MINE, response_metadata={"id": ID}),
    Thing(id=MINE, response_metadata={"headers": {"x-request-id": ID}}),
    Thing(id=ID, response_metadata={}),
    Thing(message=Thing(id=MINE, response_metadata={"id": ID})),
    Thing(type="message_start", message=Thing(id=ID)),
    Thing(type="response.created", response=Thing(id=ID)),
]


@pytest.mark.parametrize("reply", NAMED)
def test_a_reply_has_one_name_whatever_it_is_made_of(reply: object) -> None:
    assert reply_id(reply) == ID
    assert reply_id(reply, 2) == f"{ID}:2"
    assert subject_of(reply) == {"msg_ids": [ID]}


def test_several_replies_are_named_at_once() -> None:
    assert subject_of([ID, {"id": "b"}], 1) == {"msg_ids": [f"{ID}:1", "b:1"]}


RUNS: list[Any] = [
    WholeRun("t", 0),
    Run(service="http://localhost", task_id="t", run_id="0"),
    {"task_id": "t", "run_id": 0},
    Thing(task_id="t", run_id="0"),
]


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_named_by_its_task_and_its_number(run: object) -> None:
    assert subject_of(run) == {"task_id": "t", "run_id": "0"}
    with pytest.raises(ValueError, match="no choices"):
        subject_of(run, 0)


@pytest.mark.parametrize("odd", ["", " ", None, 5, {}, {"id": 5}, Thing(id=None), {"task_id": "t"}, []])
def test_what_has_no_name_is_refused_at_once(odd: object) -> None:
    with pytest.raises(ValueError, match=r"no id|no reply"):
        subject_of(odd)


def test_an_id_of_langchains_own_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="include_response_headers=True"):
        reply_id(Thing(id=MINE, response_metadata={"finish_reason": "stop"}))


@pytest.mark.parametrize("choice", [-1, True, "0", 1.5])
def test_an_odd_choice_is_refused(choice: Any) -> None:
    with pytest.raises(ValueError, match="choice"):
        reply_id(ID, choice)


def test_a_choice_of_a_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="already"):
        reply_id(f"{ID}:0", 1)
