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


@pytest.mark.parametrize(
    ("parts", "share"),
    [
        *((keys(others, 100, 0) | {("t", "key:eve"): (2000, 2000)}, 0.0) for others in (2, 10, 50)),
        (keys(5, 40, 0) | {("t", f"key:eve/{number}"): (10, 10) for number in range(100)}, 0.0),
        (keys(3, 40, 0, "a") | keys(3, 40, 0, "b") | keys(30, 40, 40, "eve"), 0.0),
        (keys(10, 50, 50) | {("t", "key:eve"): (5000, 0)}, 9 / 10),
        *((keys(voices, 200, 100), 1.0) for voices in (3, 10, 100)),
        ({("t", f"person {number}"): (1, number % 10 == 0) for number in range(200)}, 19 / 199),
        *((keys(voices, 200, 150), 0.75) for voices in (1, 2)),
    ],
)
def test_one_voice_among_others_makes_or_hides_nothing(
    parts: dict[tuple[str, str], tuple[int, int]], share: float
) -> None:
    assert share_amiss(said(parts), 200) == pytest.approx(share)


def test_who_was_silent_for_long_is_none_of_them() -> None:
    old, new = said(keys(5, 50, 0)), said({("t", "key:web"): (500, 200)}, at=SILENT_S + 1)
    events = [*old, *(each._replace(id=each.id + 1000) for each in new)]
    assert share_amiss(events, 200) == 1.0


def test_few_events_say_nothing() -> None:
    assert share_amiss(said(keys(10, 19, 19)), 200) is None
    assert share_amiss([], 200) is None
