import asyncio
import itertools
from collections.abc import Iterable

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer import upstream
from tests.doubles.engine import pieces, recorded

STREAM = recorded("stream_n2_captured.sse")
EVENTS = [piece.removeprefix(b"data:").strip() for piece in pieces(STREAM)]


async def _read(blocks: Iterable[bytes]) -> list[bytes]:
    loop = asyncio.get_running_loop()
    body = aiohttp.StreamReader(BaseProtocol(loop), 1 << 26, loop=loop)
    for block in blocks:
        body.feed_data(block)
    body.feed_eof()
    return [event async for event in upstream.events(body)]


def read(*blocks: bytes) -> list[bytes]:
    return asyncio.run(_read(blocks))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_however_a_stream_is_split_its_events_are_the_same(cuts: list[int]) -> None:
    places = sorted({0, len(STREAM), *cuts})
    assert read(*(STREAM[start:end] for start, end in itertools.pairwise(places))) == EVENTS


def test_byte_by_byte_is_the_same() -> None:
    assert read(*(bytes([each]) for each in STREAM)) == EVENTS


@pytest.mark.parametrize("end", [1, 5, len(STREAM) - 1, len(STREAM) // 2])
def test_an_event_cut_in_its_middle_is_none(end: int) -> None:
    whole = STREAM[:end].count(b"\n\n")
    assert read(STREAM[:end]) == EVENTS[:whole]


def test_comments_and_other_fields_are_passed_over() -> None:
    assert read(b": ping\n\nevent: x\n\ndata: {}\n\ndata:[DONE]\n\n") == [b"{}", b"[DONE]"]


def test_an_event_without_end_is_refused() -> None:
    with pytest.raises(aiohttp.ClientPayloadError):
        read(*[b"x" * (1 << 20)] * 17)
