from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.doubles.engine import EngineDouble
from tests.explorer.running import HELLO, RunningExplorer
from tuneloop.explorer.proxy.request import MAX_METADATA_BYTES, MAX_PRIORITY, labels_of
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import MAX_NAME, person_name

pytestmark = pytest.mark.contract

LONG = "x" * (MAX_NAME + 1)


@pytest.mark.parametrize(
    ("body", "user"),
    [
        ({}, None),
        ({"user": "u"}, "u"),
        ({"user": ""}, None),
        ({"safety_identifier": "s"}, "s"),
        ({"metadata": {"user": "m"}}, "m"),
        ({"metadata": {"user": 7}}, "7"),
        ({"user": "u", "safety_identifier": "s"}, "s"),
        ({"user": "u", "safety_identifier": "s", "metadata": {"user": "m"}}, "m"),
        ({"user": "u", "metadata": {"user": ""}}, "u"),
        ({"user": "\N{GRINNING FACE}" * MAX_NAME}, "\N{GRINNING FACE}" * MAX_NAME),
        ({"user": LONG}, person_name(LONG)),
        ({"safety_identifier": LONG}, person_name(LONG)),
        ({"metadata": {"user": LONG}}, person_name(LONG)),
        ({"user": "a\0b"}, person_name("a\0b")),
        ({"safety_identifier": ["x"]}, None),
        ({"user": "u", "metadata": {"user": {}}}, "u"),
        ({"metadata": {"user": "m", "tuneloop_user": "t"}}, "t"),
        ({"user": "u", "metadata": "words of the application's own"}, "u"),
    ],
)
def test_the_person_of_a_request(body: dict[str, Any], user: str | None) -> None:
    assert labels_of(body).user == user


@pytest.mark.parametrize(
    ("value", "priority"), [(None, 0.0), (2, 2.0), (-0.5, -0.5), ("3", 3.0), (" 1e3 ", 1e3), (MAX_PRIORITY, 1e9)]
)
def test_the_priority_of_a_request(value: object, priority: float) -> None:
    for name in ("priority", "tuneloop_priority"):
        assert labels_of({"metadata": {name: value}}).priority == priority


@pytest.mark.parametrize(
    ("value", "train"), [(False, False), ("false", False), ("no", False), (0, False), ("True", True)]
)
def test_whether_to_train_on_a_reply(value: object, train: bool) -> None:
    for name in ("train", "tuneloop_train", "Train", "TUNELOOP_TRAIN", " train "):
        assert labels_of({"metadata": {name: value}}).train is train


@pytest.mark.parametrize(("ours", "theirs"), [(True, False), (False, True), (False, False), ("yes", "off")])
def test_who_opts_out_under_either_name_is_heard(ours: object, theirs: object) -> None:
    assert labels_of({"metadata": {"tuneloop_train": ours, "train": theirs}}).train is False


@pytest.mark.parametrize(
    "metadata",
    [{"priority": "high"}, {"priority": True}, {"task_id": {}}, {"run_id": "x" * 600}, {"task_id": 1.5}, {"user": []}],
)
def test_a_word_that_cannot_be_our_label_is_the_applications_own(metadata: dict[str, Any]) -> None:
    [name] = metadata
    found = labels_of({"metadata": metadata})
    assert found == labels_of({})._replace(ignored=(f"metadata.{name}",))


@pytest.mark.parametrize(
    "body",
    [
        {"user": 5},
        {"metadata": {"tuneloop_user": {}}},
        {"metadata": {"tuneloop_task_id": 1.5}},
        {"metadata": {"tuneloop_run_id": "x" * (MAX_NAME + 1)}},
        *({"metadata": {"tuneloop_priority": value}} for value in (True, "high", "", "nan", "inf", 1e10, -1e10, [1])),
        *({"metadata": {name: value}} for name in ("train", "tuneloop_train") for value in ("maybe", 2, [], {}, "")),
        {"metadata": {"train": None}},
        {"metadata": {"tuneloop_train": None}},
        {"metadata": {"tuneloop_train": True, "train": "maybe"}},
    ],
)
def test_a_label_of_the_wrong_kind_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as refused:
        labels_of(body)
    assert refused.value.status == 400


def test_metadata_has_a_bound() -> None:
    within = {"x": "y" * (MAX_METADATA_BYTES - len('{"x":""}'))}
    assert labels_of({"metadata": within}) == labels_of({})
    with pytest.raises(RequestRefused, match="metadata must have at most 65536 bytes") as refused:
        labels_of({"metadata": within | {"z": 1}})
    assert (refused.value.status, refused.value.code) == (400, "too_long")
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(RequestRefused, match="cannot be stored"):
        labels_of({"metadata": {"x": deep}})


@given(st.one_of(st.floats(), st.integers(), st.text(max_size=5)))
def test_a_priority_is_a_number_within_its_bounds_or_refused(value: object) -> None:
    with suppress(RequestRefused):
        assert abs(labels_of({"metadata": {"tuneloop_priority": value}}).priority) <= MAX_PRIORITY


def test_the_person_and_the_priority_are_kept_and_the_user_goes_on_to_the_engine(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    explorer.chat(user="ann", metadata={"priority": 5})
    [kept] = explorer.exchanges()
    assert (kept.user, kept.priority, orjson.loads(kept.request)["user"]) == ("ann", 5.0, "ann")
    assert explorer.rows("SELECT user_id FROM exchanges") == [("ann",)]
    assert explorer.rows("SELECT priority FROM experiences") == [(5.0,)]
    assert double.chats[-1].body["user"] == "ann"
    reply = explorer.chat(user=LONG, metadata={"priority": "high"})
    assert (reply.status_code, reply.headers["x-tuneloop-ignored"]) == (200, "metadata.priority")
    assert double.chats[-1].body["user"] == LONG
    assert explorer.exchanges()[-1].user == person_name(LONG)
    assert explorer.chat(prediction={"type": "content"}).headers["x-tuneloop-ignored"] == "prediction"


@pytest.mark.parametrize("name", ["train", "tuneloop_train"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_consent_that_nobody_would_read_is_refused(explorer: RunningExplorer, path: str, name: str) -> None:
    asked = {"messages": HELLO["messages"], "prompt": "x", "input": "x", "max_tokens": 4}
    answer = explorer.http.post(path, json={"model": HELLO["model"], **asked, name: False})
    assert answer.status_code == 400
    assert f"write metadata.{name} instead" in answer.text
