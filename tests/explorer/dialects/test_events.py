import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles.engine import pieces, recorded
from tuneloop.explorer.dialects import dialect
from tuneloop.shared.errors import EngineError

pytestmark = pytest.mark.contract

STREAM = recorded("stream_n2_captured.sse")
EVENTS = [piece.removesuffix(b"\n\n") for piece in pieces(STREAM)]


def read(blocks: Iterable[bytes]) -> list[bytes]:
    rest = bytearray()
    return [event for block in blocks for event in dialect.split_events(rest, block)]


@settings(max_examples=60)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_however_a_stream_is_split_its_events_are_the_same(cuts: list[int]) -> None:
    places = sorted({0, len(STREAM), *cuts})
    assert read(STREAM[start:end] for start, end in itertools.pairwise(places)) == EVENTS


def test_byte_by_byte_is_the_same() -> None:
    assert read(bytes([each]) for each in STREAM) == EVENTS


@pytest.mark.parametrize("end", [1, 5, len(STREAM) - 1, len(STREAM) // 2])
def test_an_event_cut_in_its_middle_is_none(end: int) -> None:
    whole = STREAM[:end].count(b"\n\n")
    assert read([STREAM[:end]]) == EVENTS[:whole]


def test_an_event_without_end_is_refused() -> None:
    with pytest.raises(EngineError):
        read([b"x" * (1 << 20)] * 17)
