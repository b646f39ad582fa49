"""What may stand in a feedback body, and what it becomes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.doubles.engine import EnginePlace
from tests.explorer.running import RunningExplorer, explorer_running, settings_for
from tuneloop.explorer.auth import Caller
from tuneloop.explorer.feedback.events import MAX_CHARACTERS, MAX_IDS, EventFactory, parse_entries
from tuneloop.explorer.feedback.routes import WEAKEST_FIRST
from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.experience import MAX_NAME, Feedback, Kind, Outcome

pytestmark = pytest.mark.contract

SIGNER = ReplyIdSigner(b"k" * 32)
FIRST, SECOND = (SIGNER.mint("acme", 2) for _ in range(2))


def heard(body: dict[str, Any], header: str | None = None) -> list[Feedback]:
    """The events of a body."""
    heard = EventFactory(SIGNER, Caller(tenant="acme")).events_of(parse_entries(body, header))
    return [each.event for each in heard if each.event is not None]


def one(**body: Any) -> Feedback:
    """The event of a body about the first reply."""
    [event] = heard({"msg_ids": [FIRST]} | body)
    return event


def said(event: Feedback) -> tuple[Kind, str, float | None, str | None]:
    return event.kind, event.metric, event.value, event.text


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, places: list[EnginePlace]) -> Iterator[RunningExplorer]:
    """One explorer for all bodies: each is about a reply of its own."""
    folder: Path = tmp_path_factory.mktemp("wire")
    with explorer_running(settings_for(folder, [places[0].fresh().url])) as explorer:
        yield explorer


@pytest.mark.parametrize(
    ("body", "event"),
    [
        ({"reward": 1}, (Kind.NUMBER, "reward", 1.0, None)),
        ({"value": -0.5}, (Kind.NUMBER, "reward", -0.5, None)),
        ({"value": 2, "metric": "stars"}, (Kind.NUMBER, "stars", 2.0, None)),
        ({"value": True}, (Kind.BOOLEAN, "reward", 1.0, None)),
        ({"value": False, "metric": "helpful"}, (Kind.BOOLEAN, "helpful", 0.0, None)),
        ({"value": "good"}, (Kind.LABEL, "reward", None, "good")),
        ({"label": "good"}, (Kind.LABEL, "reward", None, "good")),
        ({"label": "good", "metric": "tone"}, (Kind.LABEL, "tone", None, "good")),
        ({"comment": "not\0 so"}, (Kind.COMMENT, "comment", None, "not\0 so")),
        ({"comment": "so", "metric": "remark"}, (Kind.COMMENT, "remark", None, "so")),
        ({"demonstration": "7"}, (Kind.DEMONSTRATION, "demonstration", None, "7")),
        ({"retract": True}, (Kind.RETRACTION, "reward", None, None)),
        ({"retract": True, "metric": "tone"}, (Kind.RETRACTION, "tone", None, None)),
        ({"reward": 1, "comment": "", "label": None, "retract": False}, (Kind.NUMBER, "reward", 1.0, None)),
    ],
)
def test_each_kind_becomes_an_event(body: dict[str, Any], event: tuple[Any, ...]) -> None:
    assert said(one(**body)) == event


def test_an_edited_answer_may_be_a_message() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    text = one(demonstration={"content": None, "tool_calls": calls}).text
    assert json.loads(text or "") == {"role": "assistant", "content": None, "tool_calls": calls}


def test_a_preference_names_both_replies() -> None:
    event = one(msg_ids=[f"{FIRST}:0"], preferred_over=f"{SECOND}:1")
    assert said(event) == (Kind.PREFERENCE, "preference", None, None)
    assert (event.msg_id, event.choice, event.other_msg_id, event.other_choice) == (FIRST, 0, SECOND, 1)
    assert one(msg_ids=[f"{FIRST}:0"], preferred_over=f"{FIRST}:1").other_choice == 1


def test_several_things_said_at_once_are_an_event_each_under_its_own_metric() -> None:
    all_at_once = {"value": True, "label": "kind", "comment": "so", "demonstration": "7", "preferred_over": SECOND}
    events = heard({"msg_ids": [FIRST], "metric": "help"} | all_at_once)
    assert {(event.kind, event.metric) for event in events} == {
        (Kind.BOOLEAN, "help"),
        (Kind.LABEL, "label"),
        (Kind.COMMENT, "comment"),
        (Kind.DEMONSTRATION, "demonstration"),
        (Kind.PREFERENCE, "preference"),
    }
    assert len({event.event_id for event in events}) == 5
    assert len({event.call_id for event in events}) == 1


def test_without_msg_ids_a_task_and_a_run_name_the_trajectory() -> None:
    [event] = heard({"reward": 1, "task_id": "t", "run_id": 0})
    assert (event.msg_id, event.choice, event.task_id, event.run_id) == (None, None, "t", "0")


def test_who_said_it_and_when_is_kept() -> None:
    event = one(reward=1, source="judge", time="2001-09-09T01:46:40Z")
    assert (event.source, event.occurred_at) == ("judge", 1e9)
    assert one(reward=1, time=5).occurred_at == 5.0


def test_a_list_has_other_things_to_say_of_each_reply() -> None:
    entries = [{"msg_ids": [FIRST], "reward": 1}, {"msg_ids": [SECOND, f"{FIRST}:1"], "value": False}]
    events = heard({"feedback": entries, "idempotency_key": "k"})
    assert [(event.msg_id, event.choice, event.value) for event in events] == [
        (FIRST, None, 1.0),
        (SECOND, None, 0.0),
        (FIRST, 1, 0.0),
    ]
    assert len({event.call_id for event in events}) == 1


def test_names_of_one_reply_are_one_event() -> None:
    bare = FIRST.removeprefix("chatcmpl-")
    events = heard({"msg_ids": [FIRST, FIRST, bare, bare.upper()], "reward": 1})
    assert len({event.event_id for event in events}) == 1


KEYED = {"msg_ids": [FIRST], "reward": 1, "idempotency_key": "k"}


def test_under_a_key_the_same_call_has_the_same_events_wherever_the_key_stands() -> None:
    keyless = {name: value for name, value in KEYED.items() if name != "idempotency_key"}
    calls = [
        heard(KEYED),
        heard(KEYED | {"reward": 0}),
        heard(keyless, "k"),
        heard(keyless, ' "k" '),
        heard(KEYED, "k"),
    ]
    assert len({event.event_id for [event] in calls}) == 1
    assert len({event.call_id for [event] in calls}) == 5
    assert heard(keyless)[0].event_id != heard(keyless)[0].event_id


@pytest.mark.parametrize(
    "but",
    [
        {"idempotency_key": "other"},
        {"msg_ids": [SECOND]},
        {"msg_ids": [f"{FIRST}:0"]},
        {"msg_ids": None, "task_id": "t", "run_id": "r"},
        {"task_id": "t"},
        {"run_id": "r"},
        {"metric": "m"},
        {"reward": None, "value": True},
        {"source": "s"},
    ],
)
def test_another_event_has_another_id(but: dict[str, Any]) -> None:
    assert heard(KEYED | but)[0].event_id != heard(KEYED)[0].event_id


def test_two_entries_under_one_key_are_two_events() -> None:
    twice = {"idempotency_key": "k", "feedback": [{"msg_ids": [FIRST], "reward": reward} for reward in (0, 1)]}
    assert len({event.event_id for event in heard(twice)}) == 2
    assert [event.event_id for event in heard(twice)] == [event.event_id for event in heard(twice)]


def test_an_entry_with_a_key_of_its_own_is_the_same_wherever_it_stands() -> None:
    """A client that lost the answer may send what is left in another call, with other entries."""
    other = {"msg_ids": [FIRST], "reward": 0, "idempotency_key": "other"}
    first, second = heard({"feedback": [other, KEYED]})
    assert heard({"feedback": [KEYED]})[0].event_id == heard(KEYED)[0].event_id == second.event_id
    assert first.event_id == heard(other)[0].event_id != second.event_id


def test_an_id_has_room_in_its_column() -> None:
    for event in (*heard(KEYED), *heard(KEYED | {"idempotency_key": None, "msg_ids": [FIRST, SECOND]})):
        assert len(event.event_id) <= 64


ABOUT_ONE = {"msg_ids": [FIRST]}
REFUSED: list[tuple[dict[str, Any], str | None]] = [
    (ABOUT_ONE, "reward"),
    (ABOUT_ONE | {"comment": "", "label": "", "value": "", "demonstration": ""}, "reward"),
    (ABOUT_ONE | {"reward": True}, "reward"),
    (ABOUT_ONE | {"reward": "1"}, "reward"),
    (ABOUT_ONE | {"reward": 1, "value": 1}, None),
    (ABOUT_ONE | {"value": [1]}, "value"),
    (ABOUT_ONE | {"value": 1e7}, "value"),
    (ABOUT_ONE | {"value": "x" * (MAX_NAME + 1)}, "value"),
    (ABOUT_ONE | {"value": "good", "label": "good"}, "label"),
    (ABOUT_ONE | {"label": 1}, "label"),
    (ABOUT_ONE | {"label": "\0"}, "label"),
    (ABOUT_ONE | {"comment": 1}, "comment"),
    (ABOUT_ONE | {"demonstration": ["x"]}, "demonstration"),
    (ABOUT_ONE | {"demonstration": {"role": "user", "content": "x"}}, "demonstration"),
    (ABOUT_ONE | {"demonstration": {"role": "assistant"}}, "demonstration"),
    (ABOUT_ONE | {"retract": "true"}, "retract"),
    (ABOUT_ONE | {"retract": True, "reward": 1}, "retract"),
    (ABOUT_ONE | {"retract": True, "comment": "x"}, "retract"),
    (ABOUT_ONE | {"preferred_over": 1}, "preferred_over"),
    (ABOUT_ONE | {"preferred_over": FIRST}, "preferred_over"),
    (ABOUT_ONE | {"preferred_over": f"{FIRST}:1"}, "preferred_over"),
    ({"msg_ids": [FIRST, SECOND], "preferred_over": SECOND}, "msg_ids"),
    ({"task_id": "t", "run_id": "r", "preferred_over": SECOND}, "msg_ids"),
    (ABOUT_ONE | {"reward": 1, "comment": "x", "metric": "comment"}, "metric"),
    (ABOUT_ONE | {"reward": 1, "metric": "x" * (MAX_NAME + 1)}, "metric"),
    (ABOUT_ONE | {"reward": 1, "source": 5}, "source"),
    (ABOUT_ONE | {"reward": 1, "source": "x" * (MAX_NAME + 1)}, "source"),
    (ABOUT_ONE | {"reward": 1, "time": "yesterday"}, "time"),
    (ABOUT_ONE | {"reward": 1, "time": True}, "time"),
    (ABOUT_ONE | {"reward": 1, "idempotency_key": 5}, "idempotency_key"),
    ({"reward": 1}, "msg_ids"),
    ({"reward": 1, "task_id": "t"}, "msg_ids"),
    ({"reward": 1, "run_id": "r"}, "msg_ids"),
    ({"reward": 1, "task_id": "t", "run_id": "r", "msg_ids": []}, "msg_ids"),
    *((ABOUT_ONE | {"reward": 1, "rating": value}, "rating") for value in (4, 4.5, 0, True, False)),
    (ABOUT_ONE | {"rating": 4}, "rating"),
    (ABOUT_ONE | {"comment": "x", "thumbs_up": True}, "thumbs_up"),
    ({"feedback": [ABOUT_ONE | {"reward": 1}], "rating": 4}, "rating"),
    ({"feedback": [ABOUT_ONE | {"reward": 1}, ABOUT_ONE | {"reward": 1, "rating": 4}]}, "feedback[1].rating"),
    ({"feedback": []}, "feedback"),
    ({"feedback": {}}, "feedback"),
    ({"feedback": [ABOUT_ONE | {"reward": 1}, []]}, "feedback"),
    ({"feedback": [ABOUT_ONE | {"reward": 1}], "reward": 1}, "reward"),
    ({"feedback": [ABOUT_ONE | {"reward": 1}, ABOUT_ONE | {"reward": "1"}]}, "feedback[1].reward"),
    ({"feedback": [{"feedback": [ABOUT_ONE | {"reward": 1}]}]}, "feedback[0].msg_ids"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
def test_a_body_that_makes_no_sense_is_refused_with_the_field_at_fault(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(RequestRefused) as refused:
        heard(body)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_two_keys_that_differ_are_refused() -> None:
    with pytest.raises(RequestRefused, match="differ"):
        heard(KEYED, "other")


@pytest.mark.parametrize("entries", [1, 2])
def test_more_ids_than_allowed_are_refused_however_they_are_spread(entries: int) -> None:
    entry = {"msg_ids": [FIRST] * (MAX_IDS // entries + 1), "reward": 1}
    with pytest.raises(RequestRefused, match="100000 are allowed") as refused:
        heard({"feedback": [entry] * entries})
    assert refused.value.status == 413


@pytest.mark.parametrize("field", ["comment", "demonstration"])
def test_a_long_text_for_many_ids_is_refused(field: str) -> None:
    text = "x" * (MAX_CHARACTERS // 1000)
    assert len(heard({"msg_ids": [FIRST] * 900, field: text})) == 1
    with pytest.raises(RequestRefused, match="so many ids") as refused:
        heard({"msg_ids": [FIRST] * 1000, field: text})
    assert refused.value.status == 413


_words = st.none() | st.text(max_size=5) | st.booleans() | st.floats() | st.lists(st.text(max_size=2), max_size=2)
_fields = ("reward", "value", "label", "comment", "demonstration", "preferred_over", "retract", "metric", "source")
_more = ("time", "idempotency_key", "task_id", "run_id")


@given(st.dictionaries(st.sampled_from(_fields + _more), _words), st.booleans())
def test_a_body_is_refused_or_becomes_events_that_the_ledger_takes(body: dict[str, Any], listed: bool) -> None:
    body = {"msg_ids": [FIRST]} | body
    try:
        events = heard({"feedback": [body]} if listed else body)
    except RequestRefused:
        return
    for event in events:
        assert (event.value is not None) == (event.kind in (Kind.NUMBER, Kind.BOOLEAN))
        assert (event.text is not None) == (event.kind in (Kind.LABEL, Kind.COMMENT, Kind.DEMONSTRATION))
    assert len({event.metric for event in events}) == len(events)


PAGE = (Path(__file__).parents[3] / "docs" / "feedback.md").read_text()


@pytest.mark.parametrize("body", re.findall("/feedback .*-d '(.*)'", PAGE))
def test_the_examples_of_the_page_are_understood(body: str) -> None:
    assert heard(json.loads(body.replace("ID", FIRST)))


def test_the_page_names_every_field_kind_and_outcome() -> None:
    fields = ("msg_ids", "task_id", "run_id", "metric", "source", "time", "idempotency_key", "reward", "value", "label")
    for word in (*fields, "comment", "demonstration", "preferred_over", "retract", *Kind, *Outcome):
        assert f"`{word}`" in PAGE
    told = " ".join(f"`{outcome}`" for outcome in WEAKEST_FIRST).replace(" ", ", ")
    assert told in " ".join(PAGE.split())


def test_every_kind_reaches_the_database(shared: RunningExplorer) -> None:
    ids = [shared.chat().json()["id"] for _ in range(2)]
    body = {"value": 0.5, "label": "kind", "comment": "so", "demonstration": "7", "preferred_over": ids[1]}
    answer = shared.http.post("/feedback", json={"msg_ids": ids[:1], **body, "source": "me", "time": 5})
    assert (answer.status_code, answer.json()["outcomes"]) == (200, {ids[0]: "accepted"})
    shared.http.post("/feedback", json={"msg_ids": ids[:1], "retract": True, "metric": "label", "source": "me"})
    kept = shared.rows("SELECT kind, metric, value, text, other_msg_id FROM feedback WHERE source = 'me' ORDER BY kind")
    assert [tuple(row) for row in kept] == [
        ("comment", "comment", None, "so", None),
        ("demonstration", "demonstration", None, "7", None),
        ("label", "label", None, "kind", None),
        ("number", "reward", 0.5, None, None),
        ("preference", "preference", None, None, ids[1]),
        ("retraction", "label", None, None, None),
    ]


def test_feedback_is_counted_by_kind_and_outcome(shared: RunningExplorer) -> None:
    said = shared.chat().json()["id"]
    for _ in range(2):
        shared.http.post("/feedback", json={"msg_ids": [said, "guess"], "value": True, "comment": "so"})
    told = shared.http.get("/metrics").text
    for kind in ("boolean", "comment"):
        for outcome in ("accepted", "duplicate"):
            assert f'tuneloop_feedback_total{{kind="{kind}",outcome="{outcome}"}} ' in told
        assert f'tuneloop_feedback_total{{kind="{kind}",outcome="unknown"}} 2.0' in told


def test_a_body_beyond_the_limit_is_refused(shared: RunningExplorer) -> None:
    said = shared.chat().json()["id"]
    answer = shared.http.post("/feedback", json={"msg_ids": [said], "comment": "x" * (8 << 20)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
