"""The counts of the page come at once, however long it takes to make them."""

import threading

import pytest

from tests.explorer.ui.conftest import Filled
from tests.explorer.ui.test_pages import words
from tuneloop.shared.ledger.facts import LedgerFacts
from tuneloop.shared.ledger.reports import Reports


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
