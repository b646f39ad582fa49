"""The overview and the exchanges: what they show, what they refuse, and that nothing of a client's gets through."""

import html
import json
import re

import pytest

from tests import factories
from tests.explorer.running import RunningExplorer
from tests.explorer.ui.conftest import Filled
from tests.explorer.ui.filled import HOSTILE, REPLIES, VERSIONS
from tuneloop.explorer.ui.conversation import last_words
from tuneloop.explorer.ui.site import figure
from tuneloop.shared.errors import LedgerUnavailable
from tuneloop.shared.experience import DEFAULT_TENANT, Exchange


def ids_in(page: str) -> list[str]:
    return re.findall(r'href="/ui/exchanges/(chatcmpl-\w+)"', page)


def words(page: str) -> str:
    """What people read."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


@pytest.mark.parametrize(
    ("value", "shown"),
    [(999.6, "1,000"), (999.4, "999"), (-999.6, "-1,000"), (0.12345, "0.123"), (12345.0, "12,345"), (None, "–")],
)
def test_a_figure_has_so_many_digits_and_no_exponent(value: float | None, shown: str):
    assert figure(value) == shown


def test_the_overview_says_whether_it_helped(filled: Filled):
    seen = words(filled.text("/ui"))
    assert "versions 6 and 5" in seen or "Version 6 earns" in seen
    assert "version 6 served since" in seen
    assert "reply_length replies are 1.6 times as long" in seen
    assert "median for the champion" in seen
    assert all(f" {version} retired" in seen for version in range(VERSIONS))


def test_the_overview_says_what_waits_and_why(filled: Filled):
    seen = words(filled.text("/ui/waiting"))
    assert "was last seen" in seen  # the trainer
    assert "feedback" in seen
    assert "a commit" in seen


@pytest.mark.parametrize("path", ["/ui", "/ui/trainer", "/ui/doctor", "/ui/exchanges/{planted}"])
def test_without_javascript_a_link_leads_to_what_a_page_asks_for_afterwards(filled: Filled, path: str):
    page = filled.text(path.format(planted=filled.planted.msg_id))
    asked = re.findall(r'hx-get="([^"]+)" hx-trigger="load', page)
    assert asked
    assert re.findall(r'<noscript><p><a href="([^"]+)">', page) == asked
    assert all(filled.text(each) for each in asked)


def test_a_new_ledger_has_an_overview_too(explorer: RunningExplorer):
    seen = words(explorer.http.get("/ui").text)
    assert "Only the base model has been served" in seen
    assert "No reply has a reward yet" in seen
    assert "No exchange is in the ledger yet" in words(explorer.http.get("/ui/exchanges").text)


def test_the_newest_exchanges_come_first_and_older_ones_follow(filled: Filled):
    found: list[str] = []
    page, path = filled.text("/ui/exchanges"), ""
    for _ in range(20):
        found += ids_in(page)
        older = re.search(r'href="(/ui/exchanges\?[^"]*)">Older', page)
        if older is None:
            break
        path = html.unescape(older[1])
        page = filled.text(path)
    assert len(set(found)) == (VERSIONS + 1) * REPLIES + 1
    assert found[0] == filled.planted.msg_id
    rows = filled.explorer.rows("SELECT msg_id FROM experiences ORDER BY sampled_at DESC, id DESC")
    assert found == [row[0] for row in rows]


@pytest.mark.parametrize(
    ("query", "condition"),
    [
        ({"version": "3"}, "version_min = 3"),
        ({"state": "trained", "version": "2"}, "state = 'trained' AND version_min = 2"),
        ({"reward_from": "0.5", "version": "1"}, "reward >= 0.5 AND version_min = 1"),
        ({"reward_to": "0", "version": "0"}, "reward <= 0 AND version_min = 0"),
        ({"user": "customer-3"}, "msg_id IN (SELECT msg_id FROM exchanges WHERE user_id = 'customer-3')"),
        ({"task": "support/app", "version": "4"}, "task_id = 'support/app' AND version_min = 4"),
        ({"run": "nobody"}, "run_id = 'nobody'"),
        ({"text": "ICELAND", "version": "5"}, "text LIKE '%Iceland%' AND version_min = 5"),
        ({"text": "address of order", "version": "5"}, "text LIKE '%changed its address%' AND version_min = 5"),
        ({"version": "77"}, "1 = 0"),
    ],
)
def test_exchanges_are_found(filled: Filled, query: dict[str, str], condition: str):
    wanted = {row[0] for row in filled.explorer.rows(f"SELECT msg_id FROM experiences WHERE {condition}")}
    assert set(ids_in(filled.text("/ui/exchanges", **query))) == wanted
    assert bool(wanted) == (condition not in {"1 = 0", "run_id = 'nobody'"})


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({"version": "abc"}, "version must be a number, not 'abc'"),
        ({"version": "-1"}, "version must be a number"),
        ({"version": "9" * 30}, "version must be a number"),
        ({"state": "done"}, "there is no state 'done'; there are recorded, rewarded"),
        *(({"reward_from": wrong}, "reward_from must be a number") for wrong in ("nan", "1_0", "\u0661")),
        ({"reward_to": "1e999"}, "reward_to must be a number"),
        ({"reward_from": "1", "reward_to": "0"}, "reward_from is larger than reward_to"),
        ({"since": "yesterday"}, "since must be a time in UTC such as"),
        ({"since": "9999-12-31T23:59:59-23:59"}, ""),
        ({"text": "x" * 201}, "text is longer than 200 characters"),
        ({"user": "x" * 257}, "user is longer than 256 characters"),
        ({"after": "x"}, "after is not a position in this list"),
        ({"after": "nan_1"}, "after is not a position in this list"),
        ({"after": "1_99999999999999999999"}, "after is not a position in this list"),
        ({"colour": "red"}, "there is no filter 'colour'"),
        ({"state": HOSTILE}, "there is no state"),
    ],
)
def test_wrong_filters_get_a_sentence(filled: Filled, query: dict[str, str], sentence: str):
    page = filled.text("/ui/exchanges", 400 if sentence else 200, **query)
    assert sentence in words(page)
    assert "<script>alert" not in page


@pytest.mark.parametrize("text", ["%", "_", "\\", "'", "\0", "\ud83d", "İ"])
def test_any_text_may_be_looked_for(filled: Filled, text: str):
    filled.text(
        f"/ui/exchanges?text={'%00' if text == chr(0) else '%ED%A0%BD' if text == chr(0xD83D) else '%25' + text}"
    )


def test_one_exchange_shows_all_that_is_known_of_it(filled: Filled):
    msg_id = ids_in(filled.text("/ui/exchanges", state="trained", version="2"))[0]
    seen = words(filled.text(f"/ui/exchanges/{msg_id}"))
    for each in ("You answer customers of a small shop", "look_up_order", "temperature 0.8", "Written by version 2"):
        assert each in seen
    assert re.search(r"Trained on by version [345] ", seen)
    assert "number reward" in seen


def test_an_exchange_without_a_reply_is_shown(filled: Filled):
    said = factories.exchange(msg_id="chatcmpl-silent", tenant=DEFAULT_TENANT, experiences=())
    filled.filler.ledger.recording.record([said])
    assert said.msg_id in words(filled.text(f"/ui/exchanges/{said.msg_id}"))


def test_tokens_come_with_their_log_probabilities(filled: Filled):
    [row, *_] = filled.explorer.rows("SELECT msg_id, completion_tokens FROM experiences WHERE version_min = 2")
    page = filled.text(f"/ui/exchanges/{row[0]}/tokens/0")
    assert page.count('<span class="t ') == row[1]
    assert "log-probability" in page
    assert "these are their ids" not in page
    assert re.search(r'<span class="t p\d" title="104: log-probability [^"]+">h</span>', page)


def test_without_an_engine_that_can_tell_tokens_are_ids(filled: Filled):
    page = filled.text(f"/ui/exchanges/{filled.planted.msg_id}/tokens/0")
    assert "these are their ids" in page
    assert "[1]</span>" in page


@pytest.mark.parametrize(
    "path", ["nothing", "chatcmpl-1", "%3Cscript%3E", "..%2F..", "x" * 3000, "chatcmpl-1/tokens/0"]
)
def test_an_exchange_that_is_not_there_gets_a_sentence(filled: Filled, path: str):
    page = filled.text(f"/ui/exchanges/{path}", 404)
    assert "<script>" not in page.replace("<script src=", "")


@pytest.mark.parametrize("choice", ["1", "x", "-1", "9999999999", "%C2%B2"])
def test_a_choice_that_is_not_there_gets_a_sentence(filled: Filled, choice: str):
    filled.text(f"/ui/exchanges/{filled.planted.msg_id}/tokens/{choice}", 404)


def test_an_exchange_of_another_tenant_is_not_there(filled: Filled):
    other: Exchange = factories.exchange(tenant="another")
    filled.filler.ledger.recording.record([other])
    assert other.tenant != DEFAULT_TENANT
    filled.text(f"/ui/exchanges/{other.msg_id}", 404)
    assert other.msg_id not in filled.text("/ui/exchanges", until="1970-01-02T00:00")


def test_what_clients_wrote_is_shown_and_does_nothing(filled: Filled):
    for path in ("/ui/exchanges", f"/ui/exchanges/{filled.planted.msg_id}", "/ui/exchanges?text=onerror"):
        page = filled.text(path)
        assert "<script>alert" not in page
        assert "<img src=x" not in page
        assert "<b>stop" not in page
        assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in page
        assert not set(page) & set("\x1b\u202e\u2066\u200b"), path
        assert "⟨U+001B⟩[31mred⟨U+202E⟩back⟨U+2066⟩⟨U+200B⟩" in page


def test_without_a_database_a_page_says_so(filled: Filled, monkeypatch: pytest.MonkeyPatch):
    def away(*_: object) -> None:
        raise LedgerUnavailable("connection to postgres://secret@host refused")

    for part in (
        filled.explorer.ledger.versions,
        filled.explorer.ledger.reply_pages,
        filled.explorer.ledger.exchange_views,
    ):
        monkeypatch.setattr(part, "_read", away)
        monkeypatch.setattr(part, "_read_together", away)
    for path in ("/ui", "/ui/exchanges", "/ui/exchanges/x"):
        page = filled.text(path, 503)
        assert "The database cannot be read at the moment." in page
        assert "secret" not in page


def test_what_is_no_page_is_said_to_be_none(filled: Filled):
    assert "there is no page /ui/nothing/there" in filled.text("/ui/nothing/there", 404)


@pytest.mark.parametrize("name", ["ui.css", "ui.js", "htmx.min.js", "uplot.min.js", "uplot.LICENSE", "htmx.LICENSE"])
def test_our_files_are_served_with_their_licences(filled: Filled, name: str):
    assert filled.explorer.http.get(f"/ui/static/{name}").status_code == 200
    assert filled.explorer.http.get(f"/ui/static/..%2f{name}").status_code == 404


# What a list shows of a request: the beginning of what its page says last.


def said(**body: object) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("request_", "shown"),
    [
        (said(messages=[{"role": "user", "content": "first"}, {"role": "user", "content": "last é😀"}]), "last é😀"),
        (said(messages=[{"content": "first"}, None]), "first"),
        (said(messages=[{"content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"text": "b"}]}]), "a\nb"),
        (said(messages=[{"content": [1]}]), "[1]"),
        (said(messages=[{"content": None}]), ""),
        (said(messages=[], system="be kind"), "be kind"),
        (said(input="a question", instructions="be brief"), "a question"),
        (said(prompt=["once", "twice"]), '["once", "twice"]'),
        (said(), ""),
        (said(messages="x" * 1000), "x" * 20),
        (b"no JSON \xff", "no JSON \ufffd"),
        (b"[" * 100_000, "[" * 20),
    ],
)
def test_a_list_shows_the_beginning_of_what_was_said_last(request_: bytes, shown: str):
    assert last_words(request_, 20) == shown
