"""The counts of the page come at once, however long it takes to make them."""

import threading
import time
from pathlib import Path

import pytest

from tests.explorer.running import open_ledger, settings_for
from tests.explorer.ui.conftest import Filled
from tests.explorer.ui.test_pages import words
from tuneloop.explorer.ui.ledger_counts import LedgerCounts
from tuneloop.shared.errors import LedgerUnavailable
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.facts import LedgerFacts, StateCount
from tuneloop.shared.ledger.reports import Reports


class SlowReports(Reports):
    """Counts when it is let, so many rows as it has counted times; or finds the database away."""

    def __init__(self, clock: list[float], takes: float) -> None:
        self.clock, self.takes, self.times = clock, takes, 0
        self.let = threading.Semaphore(0)
        self.away = False

    def facts(self, *_: object, **__: object) -> LedgerFacts:
        assert self.let.acquire(timeout=60)
        if self.away:
            raise LedgerUnavailable("away")
        self.times += 1
        self.clock[0] += self.takes
        return LedgerFacts(states={State.RECORDED: StateCount(self.times)})


@pytest.fixture
def slow(tmp_path: Path) -> tuple[LedgerCounts, SlowReports]:
    settings = settings_for(tmp_path)
    ledger, clock = open_ledger(settings), [1000.0]
    reports = SlowReports(clock, takes=2.0)
    ledger.reports = reports
    return LedgerCounts(settings, ledger, patience_s=0.01, now=lambda: clock[0]), reports


def rows(counts: LedgerCounts) -> int | None:
    facts = counts.get().facts
    return facts and facts.ledger and facts.ledger.count(State.RECORDED).rows


def settled(counts: LedgerCounts) -> int | None:
    until = time.monotonic() + 30
    while counts.get().counting:
        assert time.monotonic() < until
    return rows(counts)


def test_who_asks_first_hears_that_it_is_counted_and_one_count_serves_all(slow: tuple[LedgerCounts, SlowReports]):
    counts, reports = slow
    assert [counts.get().facts for _ in range(3)] == [None] * 3
    assert counts.get().counting
    reports.let.release()
    assert settled(counts) == 1
    assert reports.times == 1


def test_counts_are_used_twenty_times_as_long_as_it_took_to_make_them(slow: tuple[LedgerCounts, SlowReports]):
    counts, reports = slow
    reports.let.release()
    counts.get()
    assert settled(counts) == 1
    reports.clock[0] += 39.9
    assert not counts.get().counting
    reports.clock[0] += 0.2
    assert counts.get().counting
    assert rows(counts) == 1  # the old ones, until there are new ones
    reports.let.release()
    assert settled(counts) == 2


def test_who_counts_in_vain_says_so_and_tries_again(slow: tuple[LedgerCounts, SlowReports]):
    counts, reports = slow
    reports.away = True
    reports.let.release()
    with pytest.raises(LedgerUnavailable):
        settled(counts)
    reports.away = False
    reports.let.release()
    counts.get()
    assert settled(counts) == 1


def test_the_pages_say_that_it_is_counted_and_ask_again(filled: Filled, monkeypatch: pytest.MonkeyPatch):
    let, facts = threading.Event(), Reports.facts

    def slowly(*arguments: object, **rules: object) -> LedgerFacts:
        assert let.wait(60)
        return facts(*arguments, **rules)  # type: ignore[arg-type]

    monkeypatch.setattr(Reports, "facts", slowly)
    for path in ("/ui/waiting", "/ui/trainer/status"):
        page = filled.text(path)
        assert "Counting…" in words(page)
        assert f'hx-get="{path}"' in page
    let.set()
    assert "a commit" in words(filled.counted("/ui/waiting"))
    assert "Trained on" in words(filled.counted("/ui/trainer/status"))
