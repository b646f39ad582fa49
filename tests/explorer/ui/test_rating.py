"""Feedback that is given on the page."""

import re

import httpx
import pytest

from tests.explorer.ui.conftest import Filled
from tests.explorer.ui.filled import HOSTILE
from tests.explorer.ui.test_pages import ids_in, words
from tests.explorer.ui.test_sessions import token_in
from tuneloop.shared.experience import State


def newest(filled: Filled, place: int) -> str:
    return ids_in(filled.text("/ui/exchanges", state="recorded"))[place]


def say(filled: Filled, msg_id: str, status: int = 303, **fields: str) -> str:
    form = {"token": token_in(filled.text(f"/ui/exchanges/{msg_id}")), "choice": "0"} | fields
    answer = filled.explorer.http.post(f"/ui/exchanges/{msg_id}/feedback", data=form)
    assert answer.status_code == status, words(answer.text)
    return words(filled.text(answer.headers["location"])) if status == 303 else words(answer.text)


def events(filled: Filled, msg_id: str) -> list[tuple[object, ...]]:
    rows = filled.explorer.rows(f"SELECT kind, value, text, source FROM feedback WHERE msg_id = '{msg_id}' ORDER BY id")
    return [tuple(row) for row in rows]


def test_a_thumb_is_feedback(filled: Filled):
    msg_id = newest(filled, 3)
    assert "Stored. It counts" in say(filled, msg_id, thumb="up")
    assert events(filled, msg_id) == [("boolean", 1.0, None, "page")]
    say(filled, msg_id, thumb="down")
    [(reward,)] = filled.explorer.rows(f"SELECT reward FROM experiences WHERE msg_id = '{msg_id}'")
    assert reward == 0


def test_a_reward_a_comment_and_an_edited_answer_come_together(filled: Filled):
    msg_id = newest(filled, 4)
    say(filled, msg_id, reward="0.25", comment=HOSTILE, demonstration=f"Better.\r\n{HOSTILE}", was="Worse.")
    said = events(filled, msg_id)
    assert said == [
        ("number", 0.25, None, "page"),
        ("demonstration", None, f"Better.\n{HOSTILE}", "page"),
        ("comment", None, HOSTILE, "page"),
    ]
    assert "<script>alert" not in filled.text(f"/ui/exchanges/{msg_id}")


def test_an_answer_that_was_not_edited_is_no_demonstration(filled: Filled):
    msg_id = newest(filled, 5)
    say(filled, msg_id, thumb="up", demonstration="As it was.\r\nYes.", was="As it was.\nYes.")
    assert [kind for kind, *_ in events(filled, msg_id)] == ["boolean"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "There is nothing to record"),
        ({"thumb": "up", "reward": "-1"}, "Give a thumb or a reward, not both"),
        *(({"reward": wrong}, "The reward must be a number.") for wrong in ("good", "1_0", "\u0660.\u0665")),
        ({"reward": "inf"}, "reward must lie between"),
        ({"reward": "1e9"}, "reward must lie between"),
    ],
)
def test_what_says_nothing_gets_a_sentence(filled: Filled, fields: dict[str, str], sentence: str):
    assert sentence in say(filled, newest(filled, 6), 400, **fields)


def test_a_reply_that_is_not_there_cannot_be_rated(filled: Filled):
    token = token_in(filled.text(f"/ui/exchanges/{newest(filled, 6)}"))
    answer = filled.explorer.http.post("/ui/exchanges/chatcmpl-1/feedback", data={"token": token, "thumb": "up"})
    assert answer.status_code == 404
    assert "none of them is an id of our replies" in words(answer.text)


def test_feedback_without_the_token_is_refused(filled: Filled):
    msg_id = newest(filled, 6)
    answer = filled.explorer.http.post(f"/ui/exchanges/{msg_id}/feedback", data={"thumb": "up"})
    assert answer.status_code == 403
    assert events(filled, msg_id) == []


@pytest.mark.parametrize("path", ["/ui/preferences", "/ui/exchanges/{msg_id}"])
def test_the_first_page_that_a_browser_opens_has_a_form_that_it_can_send(filled: Filled, path: str):
    path = path.format(msg_id=newest(filled, 8))
    with httpx.Client(base_url=filled.explorer.url) as browser:
        form = {"token": token_in(browser.get(path).text)}
        assert (
            "There is nothing to record" in browser.post(f"/ui/exchanges/{newest(filled, 8)}/feedback", data=form).text
        )


def names(page: str) -> tuple[str, str]:
    better, worse = re.findall(r'name="better" value="([^"]+)"', page)
    return better, worse


def test_preferences_are_asked_blind_and_stored(filled: Filled):
    page = filled.text("/ui/preferences")
    one, other = names(page)
    assert "version" not in words(page).lower().replace("versions", "")
    assert "reward" not in words(page.partition("The conversation")[2]).lower()
    assert "counts for nothing here: the metric preference has no weight" in words(page)
    form = {"token": token_in(page), "better": one, "worse": other}
    answer = filled.explorer.http.post("/ui/preferences", data=form)
    assert answer.status_code == 303
    page = filled.text(answer.headers["location"])
    assert "Stored." in words(page)
    assert {one, other} != set(names(page))
    rows = filled.explorer.rows(
        "SELECT msg_id, choice, other_msg_id, other_choice, source FROM feedback WHERE kind = 'preference'"
    )
    assert [(f"{row[0]}:{row[1]}", f"{row[2]}:{row[3]}", row[4]) for row in rows] == [(one, other, "page")]


def test_a_pair_may_be_skipped_until_there_are_no_more(filled: Filled):
    page, seen = filled.text("/ui/preferences"), []
    while skip := re.search(r'href="(/ui/preferences\?after=[^"]+)"', page):
        seen.append(frozenset(names(page)))
        page = filled.text(skip[1])
    assert len(seen) == len(set(seen)) > 3
    assert "There are no more pairs" in words(page)


@pytest.mark.parametrize("fields", [{}, {"better": "x"}, {"better": "x", "worse": "x"}, {"better": "x", "worse": "y"}])
def test_a_preference_between_nothing_gets_a_sentence(filled: Filled, fields: dict[str, str]):
    token = token_in(filled.text("/ui/preferences"))
    answer = filled.explorer.http.post("/ui/preferences", data={"token": token, **fields})
    assert answer.status_code in {400, 404}
    assert words(answer.text)


def test_a_place_that_is_none_gets_a_sentence(filled: Filled):
    assert "after is not a position" in words(filled.text("/ui/preferences", 400, after="x"))


@pytest.mark.parametrize("path", ["/ui/exchanges", "/ui/preferences", "/ui/exchanges/{msg_id}?outcome=accepted"])
def test_what_is_rated_is_committed_where_it_is_rated(filled: Filled, path: str):
    msg_id = newest(filled, 7)
    assert "Stored. It counts" in say(filled, msg_id, thumb="up")
    page = filled.text(path.format(msg_id=msg_id))
    assert 'action="/ui/commit"' in page
    waiting = filled.explorer.counts()[State.REWARDED]
    assert waiting > 0
    answer = filled.explorer.http.post("/ui/commit", data={"token": token_in(page)})
    assert answer.headers["location"] == f"/ui/exchanges?committed={waiting}"
    assert f"{waiting} experience" in words(filled.text(answer.headers["location"]))
    assert filled.explorer.counts()[State.REWARDED] == 0
    assert "for training" not in words(filled.text("/ui/exchanges", committed="<b>7"))
    assert filled.explorer.http.post("/ui/commit", data={}).status_code == 403
