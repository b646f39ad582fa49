"""Tenants take turns: what one says much of, or what is much work, keeps nobody else waiting."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from tests.explorer.capture.test_flusher import Notebook, append, flushing, own, slots_of
from tests.factories import exchange, feedback
from tuneloop.explorer.capture import flusher as flusher_module
from tuneloop.explorer.capture.control_client import Flushed, FlushTarget
from tuneloop.explorer.capture.flusher import _Urgency
from tuneloop.explorer.capture.merge import GROUP, SlotQueue, Source
from tuneloop.explorer.capture.spool import Spool
from tuneloop.shared.experience import Record, decode

__all__ = ["own"]


class Diary(Notebook):
    """Notes whose records it is given together."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[list[str]] = []

    def record(self, records: Sequence[Record], slots: Sequence[object] = ()) -> None:
        self.groups.append([each.key for each in records])


class Gate(Notebook):
    """Takes a group each time it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Semaphore(0)

    def record(self, records: Sequence[Record], slots: Sequence[object] = ()) -> None:
        assert self.may.acquire(timeout=60)
        super().record(records, slots)


def of(records: Sequence[Record], tenant: str) -> list[Record]:
    return [each for each in records if each.tenant == tenant]


def source_of(own: Spool) -> Source:
    return Source(own.folder, own.flushed, own.end)


def tenants_of(queue: SlotQueue) -> Iterator[list[str]]:
    while group := queue.take():
        yield [decode(entry.payload).tenant for entry in group]
        queue.finish(group, 0.0)


async def test_who_comes_behind_a_flood_is_answered_after_one_group_of_it(own: Spool) -> None:
    gate, flood = Gate(), [feedback() for _ in range(20 * GROUP)]
    said = [exchange(tenant="other"), feedback(tenant="other")]
    with flushing(own, gate) as (flusher, _):
        await append(own, *flood, *said)  # at once: who comes later is seen after half a second of work
        commit = asyncio.ensure_future(flusher.wait_until_flushed(60, FlushTarget("other")))
        theirs = asyncio.ensure_future(flusher.wait_until_flushed(60, FlushTarget("acme")))
        all_ = asyncio.ensure_future(flusher.wait_until_flushed(60))
        gate.may.release(3)
        assert await commit
        assert of(gate.records, "other") == said
        assert len(gate.records) < 4 * GROUP
        assert not theirs.done()
        assert not all_.done()
        gate.may.release(100)
        assert await theirs
        assert await all_
    assert of(gate.records, "acme") == flood
    assert own.backlog_bytes() == 0


async def test_who_comes_while_a_flood_is_being_moved_has_a_turn_too(
    own: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneloop.explorer.capture.flusher._SLICE_S", 0.0)
    gate, flood, late = Gate(), [feedback() for _ in range(20 * GROUP)], feedback(tenant="late")
    with flushing(own, gate) as (flusher, _):
        await append(own, *flood)
        gate.may.release(2)
        async with asyncio.timeout(60):
            while len(gate.records) < 2 * GROUP:  # noqa: ASYNC110 - another thread fills it
                await asyncio.sleep(0.01)
        await append(own, late)
        commit = asyncio.ensure_future(flusher.wait_until_flushed(60, FlushTarget("late")))
        gate.may.release(3)
        assert await commit
        assert len(gate.records) < 6 * GROUP
        gate.may.release(100)
        assert await flusher.wait_until_flushed(60)
    assert of(gate.records, "acme") == flood


async def test_what_is_left_in_the_middle_of_a_flood_is_moved_after_a_restart(own: Spool) -> None:
    gate, flood, other = Gate(), [feedback() for _ in range(3 * GROUP)], feedback(tenant="other")
    await append(own, *flood, other)
    queue = SlotQueue()
    assert queue.read([source_of(own)])
    first, others = queue.take(), queue.take()
    assert [decode(entry.payload) for entry in others] == [other]
    assert queue.finish(others, 0.0) == {}  # it lies behind what is not done: a restart reads it again
    [done] = queue.finish(first, 0.0).values()
    own.flushed.move(done)
    gate.may.release(100)
    with flushing(own, gate, slots_of(own)) as (flusher, _):
        assert await flusher.wait_until_flushed(60)
    assert [each for each in gate.records if each.tenant == "acme"] == flood[GROUP:]
    assert other in gate.records


async def test_small_tenants_share_a_group(own: Spool) -> None:
    await append(own, *(feedback(tenant=f"tenant {number}") for number in range(100)))
    queue = SlotQueue()
    queue.read([source_of(own)])
    assert len(list(tenants_of(queue))) == 1


async def test_who_makes_much_work_has_small_groups_and_others_have_not(own: Spool) -> None:
    await append(own, *(feedback() for _ in range(10 * GROUP)), *(feedback(tenant="other") for _ in range(4 * GROUP)))
    queue = SlotQueue()
    queue.read([source_of(own)])
    sizes: dict[str, list[int]] = {"acme": [], "other": []}
    while group := queue.take():
        [tenant] = {decode(entry.payload).tenant for entry in group}
        sizes[tenant].append(len(group))
        queue.finish(group, 10.0 if tenant == "acme" and len(sizes["acme"]) < 8 else 0.0)
    assert sizes["other"] == [GROUP] * 4
    assert sizes["acme"][:8] == [512, 256, 128, 64, 32, 16, 8, 8]
    assert max(sizes["acme"][8:]) == GROUP  # it is no work any more
    assert sum(sizes["acme"]) == 10 * GROUP


async def test_no_more_is_read_ahead_than_there_is_room_for(own: Spool) -> None:
    await append(own, *(feedback() for _ in range(100)))
    for queue in (SlotQueue(ahead=30), SlotQueue(ahead_bytes=2000)):
        complete, total = False, 0
        while not complete:
            complete = queue.read([source_of(own)])
            assert len(queue) <= 30
            total += sum(map(len, tenants_of(queue)))
        assert total == 100


async def test_a_large_group_is_cut_by_its_bytes(own: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneloop.explorer.capture.merge.GROUP_BYTES", 1500)
    await append(own, *(exchange(request=b'"' + b"x" * 600 + b'"') for _ in range(6)))
    queue = SlotQueue()
    queue.read([source_of(own)])
    assert [len(each) for each in tenants_of(queue)] == [2, 2, 2]


async def test_keys_of_one_tenant_take_turns(own: Spool) -> None:
    gate, flood = Gate(), [feedback(key="loud") for _ in range(20 * GROUP)]
    said = [exchange(key="quiet"), feedback(key="quiet")]
    with flushing(own, gate) as (flusher, _):
        await append(own, *flood, *said)  # at once: who comes later is seen after half a second of work
        theirs = asyncio.ensure_future(flusher.wait_until_flushed(60, FlushTarget("acme", "quiet")))
        all_ = asyncio.ensure_future(flusher.wait_until_flushed(60, FlushTarget("acme")))
        gate.may.release(3)
        assert await theirs is Flushed.ASKED
        assert [each for each in gate.records if each.key == "quiet"] == said
        assert len(gate.records) < 4 * GROUP
        assert not all_.done()
        gate.may.release(100)
        assert await all_ is Flushed.ALL
        assert await flusher.wait_until_flushed(60, FlushTarget("acme", "quiet")) is Flushed.ALL
    assert [each for each in gate.records if each.key == "loud"] == flood
    assert own.backlog_bytes() == 0


async def test_a_tenant_has_no_more_turns_for_having_more_keys(own: Spool) -> None:
    await append(own, *(feedback(key=f"key {number % 3}") for number in range(9 * GROUP)))
    await append(own, *(feedback(tenant="other") for _ in range(3 * GROUP)))
    queue = SlotQueue()
    queue.read([source_of(own)])
    turns = []
    while group := queue.take():
        [whose] = {(entry.owner.tenant, entry.owner.key) for entry in group}
        turns.append(whose)
        queue.finish(group, 0.0)
    first = [("acme", "key 0"), ("other", ""), ("acme", "key 1"), ("other", ""), ("acme", "key 2"), ("other", "")]
    assert turns == first + 2 * [("acme", f"key {number}") for number in range(3)]


async def test_keys_without_a_backlog_keep_the_order_in_which_they_spoke(own: Spool) -> None:
    said = [feedback(key=f"key {number % 3}") for number in range(90)]
    await append(own, *said)
    queue = SlotQueue()
    queue.read([source_of(own)])
    assert [decode(entry.payload) for entry in queue.take()] == said


def test_something_is_begun_at_once_for_each_but_not_all_the_time_for_one_of_several() -> None:
    urgency, loud, quiet = _Urgency(), FlushTarget("acme", "loud"), FlushTarget("acme", "quiet")
    assert [urgency.begins(loud, at) for at in (0.0, 0.01, 0.02)] == [True] * 3
    assert [urgency.begins(each, 0.03) for each in (quiet, loud, quiet)] == [True, False, False]
    assert [urgency.begins(loud, at) for at in (0.1, 0.125, 0.15)] == [False, True, False]
    all_, ratings = FlushTarget("acme", asker="loud"), FlushTarget("acme", asker="loud", rewards_only=True)
    by_other = FlushTarget("acme", asker="quiet")
    assert [urgency.begins(each, 0.16) for each in (all_, all_, by_other, ratings)] == [True, False, True, True]
    assert [urgency.begins(loud, at) for at in (1.5, 1.51, 1.52)] == [True] * 3  # the other one has left


async def test_who_waits_for_nothing_does_not_begin_what_others_said(
    own: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = Diary()
    with flushing(own, diary) as (flusher, _):
        await append(own, feedback(key="first"))
        assert await flusher.wait_until_flushed(60)
        monkeypatch.setattr(flusher_module, "_LOOK_S", 600.0)
        await append(own, feedback(key="second"))
        assert await flusher.wait_until_flushed(60)
        await append(own, feedback(key="loud"))
        assert await flusher.wait_until_flushed(60, FlushTarget("another")) is Flushed.ALL
        assert await flusher.wait_until_flushed(60, FlushTarget("acme", "rater")) is Flushed.ASKED
        await append(own, feedback(key="quiet"))
        assert await flusher.wait_until_flushed(60, FlushTarget("acme", "quiet")) is Flushed.ALL
    assert diary.groups == [["first"], ["second"], ["loud", "quiet"]]


async def test_who_waits_for_ratings_does_not_wait_for_others_replies_of_no_run(own: Spool, unhurried: None) -> None:
    diary = Diary()
    with flushing(own, diary) as (flusher, _):
        wait = partial(flusher.wait_until_flushed, 60, FlushTarget("acme", asker="quiet", rewards_only=True))
        await append(own, feedback(key="first"))
        assert await flusher.wait_until_flushed(60)
        await append(own, exchange(key="loud"), exchange(key="loud", task_id="t"))
        assert await wait() is Flushed.ASKED
        assert diary.groups == [["first"]]
        await append(own, exchange(key="of a run", task_id="t", run_id="r"))
        assert await wait() is Flushed.ALL
        await append(own, exchange(key="loud"))
        assert await wait() is Flushed.ASKED
        await append(own, feedback(key="rater"))
        assert await wait() is Flushed.ALL
        await append(own, exchange(key="quiet"))
        assert await wait() is Flushed.ALL, "its own are waited for"
    assert diary.groups == [["first"], ["loud", "loud", "of a run"], ["loud", "rater"], ["quiet"]]


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flusher that begins nothing unless somebody has it begin at once, for whom nobody is ever absent."""
    monkeypatch.setattr(flusher_module, "_LOOK_S", 600.0)
    monkeypatch.setattr(flusher_module, "_ABSENT_S", 600.0)


async def test_who_says_a_little_all_the_time_has_no_transactions_of_its_own_while_others_wait(
    own: Spool, unhurried: None
) -> None:
    diary = Diary()

    async def say(key: str) -> Flushed:
        await append(own, feedback(key=key))
        return await flusher.wait_until_flushed(60, FlushTarget("acme", key))

    with flushing(own, diary) as (flusher, _):
        for key in ("loud", "loud", "quiet"):  # nobody else waits for the first two
            assert await say(key)
        again = asyncio.ensure_future(say("loud"))
        while not own.backlog_bytes():  # noqa: ASYNC110 - it is written by another task
            await asyncio.sleep(0)
        assert await say("third")
        assert await again
    assert diary.groups == [["loud"], ["loud"], ["quiet"], ["loud", "third"]]


async def test_who_waits_for_all_of_a_tenants_does_not_take_the_turn_of_another_key_that_does(
    own: Spool, unhurried: None
) -> None:
    diary = Diary()
    with flushing(own, diary) as (flusher, _):
        for asker in ("loud", "loud", "quiet"):
            await append(own, feedback(key="loud"))
            assert await flusher.wait_until_flushed(10, FlushTarget("acme", asker=asker)) is Flushed.ALL
    assert diary.groups == [["loud"]] * 3
