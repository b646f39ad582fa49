from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.doubles.engine import EngineDouble
from tests.explorer.running import RunningExplorer
from tuneloop.explorer.proxy.labels import MAX_PRIORITY, labels_of
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import MAX_NAME


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
    ],
)
def test_the_person_of_a_request(body: dict[str, Any], user: str | None) -> None:
    assert labels_of(body).user == user


@pytest.mark.parametrize(
    ("value", "priority"), [(None, 0.0), (2, 2.0), (-0.5, -0.5), ("3", 3.0), (" 1e3 ", 1e3), (MAX_PRIORITY, 1e9)]
)
def test_the_priority_of_a_request(value: object, priority: float) -> None:
    assert labels_of({"metadata": {"priority": value}}).priority == priority


@pytest.mark.parametrize(
    "body",
    [
        {"user": 5},
        {"user": "x" * (MAX_NAME + 1)},
        {"user": "a\0b"},
        {"safety_identifier": ["x"]},
        {"safety_identifier": "x" * (MAX_NAME + 1)},
        {"metadata": {"user": {}}},
        {"metadata": {"user": "x" * (MAX_NAME + 1)}},
        *({"metadata": {"priority": value}} for value in (True, "high", "", "nan", "inf", 1e10, -1e10, [1], {})),
    ],
)
def test_a_label_of_the_wrong_kind_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as refused:
        labels_of(body)
    assert refused.value.status == 400


@given(st.one_of(st.floats(), st.integers(), st.text(max_size=5)))
def test_a_priority_is_a_number_within_its_bounds_or_refused(value: object) -> None:
    with suppress(RequestRefused):
        assert abs(labels_of({"metadata": {"priority": value}}).priority) <= MAX_PRIORITY


def test_the_person_and_the_priority_are_kept_and_the_user_goes_on_to_the_engine(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    explorer.chat(user="ann", metadata={"priority": 5})
    [kept] = explorer.exchanges()
    assert (kept.user, kept.priority, orjson.loads(kept.request)["user"]) == ("ann", 5.0, "ann")
    assert explorer.rows("SELECT user_id FROM exchanges") == [("ann",)]
    assert explorer.rows("SELECT priority FROM experiences") == [(5.0,)]
    assert double.chats[-1].body["user"] == "ann"
    assert explorer.chat(user="x" * (MAX_NAME + 1)).status_code == 400
