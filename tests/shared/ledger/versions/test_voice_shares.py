"""One voice makes nothing look amiss where there are others."""

from collections.abc import Iterator, Mapping

import pytest

from tuneloop.shared.ledger.versions.drift import SILENT_S, SuspectEvent, share_amiss


def said(parts: Mapping[tuple[str, str], tuple[int, int]], *, at: float = 0.0) -> Iterator[SuspectEvent]:
    """Of each rater so many events, and so many of them amiss, the newest."""
    number = 0
    for rater, (count, amiss) in parts.items():
        for place in range(count):
            number += 1
            yield SuspectEvent(number, at, rater, place >= count - amiss)


def keys(count: int, events: int, amiss: int, tenant: str = "t") -> dict[tuple[str, str], tuple[int, int]]:
    return {(tenant, f"key:k{number}/ann"): (events, amiss) for number in range(count)}


@pytest.mark.parametrize("others", [2, 10, 50])
def test_one_that_floods_raises_nothing_among_others(others: int) -> None:
    assert share_amiss(said(keys(others, 100, 0) | {("t", "key:eve"): (2000, 2000)}), 200) == 0.0


def test_neither_do_all_the_names_of_one_key() -> None:
    names = {("t", f"key:eve/{number}"): (10, 10) for number in range(100)}
    assert share_amiss(said(keys(5, 40, 0) | names), 200) == 0.0


def test_neither_do_all_the_keys_of_one_tenant() -> None:
    others = keys(3, 40, 0, "a") | keys(3, 40, 0, "b")
    assert share_amiss(said(others | keys(30, 40, 40, "eve")), 200) == 0.0


def test_what_one_says_does_not_hide_what_the_others_do() -> None:
    assert share_amiss(said(keys(10, 50, 50) | {("t", "key:eve"): (5000, 0)}), 200) == pytest.approx(9 / 10)


@pytest.mark.parametrize("voices", [3, 10, 100])
def test_a_wide_change_is_seen(voices: int) -> None:
    assert share_amiss(said(keys(voices, 200, 100)), 200) == pytest.approx(1.0)


def test_a_part_of_all_is_told_as_it_is() -> None:
    people = {("t", f"person {number}"): (1, number % 10 == 0) for number in range(200)}
    assert share_amiss(said(people), 200) == pytest.approx(19 / 199)


@pytest.mark.parametrize("voices", [1, 2])
def test_one_or_two_are_all_there_is(voices: int) -> None:
    assert share_amiss(said(keys(voices, 200, 150)), 200) == 0.75


def test_who_was_silent_for_long_is_none_of_them() -> None:
    old, new = said(keys(5, 50, 0)), said({("t", "key:web"): (500, 200)}, at=SILENT_S + 1)
    events = [*old, *(each._replace(id=each.id + 1000) for each in new)]
    assert share_amiss(events, 200) == 1.0


def test_few_events_say_nothing() -> None:
    assert share_amiss(said(keys(10, 19, 19)), 200) is None
    assert share_amiss([], 200) is None
