"""Replies page by page on both databases: what is found, in which order, and how far back is looked."""

import json
import tracemalloc

import pytest
from scipy.stats import binomtest

from tests import factories
from tuneloop.shared.experience import Kind, State
from tuneloop.shared.ledger.browsing import reply_pages
from tuneloop.shared.ledger.browsing.reply_pages import ReplyFilter, digest_of_prompt
from tuneloop.shared.ledger.ledger import Ledger

TENANT = "acme"

#: Bytes of a large request, and how many there are: more than twice what is read at once.
LARGE, MANY = 2 << 20, 20


def recorded(ledger: Ledger, count: int, **but: object) -> list[str]:
    said = [factories.exchange(**but) for _ in range(count)]
    ledger.recording.record(said)
    return [each.msg_id for each in said]


def everything(ledger: Ledger, wanted: ReplyFilter, limit: int = 3) -> list[str]:
    found: list[str] = []
    after = None
    for _ in range(100):
        page = ledger.reply_pages.page(TENANT, wanted, after=after, limit=limit)
        found += [row.msg_id for row in page.rows]
        after = page.after
        if after is None:
            return found
    raise AssertionError("the list never ends")


def test_pages_have_every_reply_once_the_newest_first(ledger: Ledger):
    ids = recorded(ledger, 10)
    assert everything(ledger, ReplyFilter()) == ids[::-1]
    assert everything(ledger, ReplyFilter(), limit=10) == ids[::-1]


def test_replies_of_the_same_moment_are_each_on_one_page(ledger: Ledger):
    ids = recorded(ledger, 7, received_at=5.0)
    assert sorted(everything(ledger, ReplyFilter())) == sorted(ids)


def test_another_tenants_replies_are_on_no_page(ledger: Ledger):
    recorded(ledger, 3, tenant="another")
    ours = recorded(ledger, 2)
    assert everything(ledger, ReplyFilter()) == ours[::-1]
    assert everything(ledger, ReplyFilter(text="hello")) == ours[::-1]
    assert ledger.exchange_views.get("another", ours[0]) is None


@pytest.mark.parametrize("rare", [0, 2_000])
def test_persons_and_tasks_are_found_by_their_index_or_on_the_way(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, rare: int
):
    monkeypatch.setattr(reply_pages, "_RARE", rare)
    recorded(ledger, 4)
    theirs = recorded(ledger, 4, user="ann", task_id="sums", run_id="1")
    recorded(ledger, 4, user="bob", task_id="other")
    for wanted in (ReplyFilter(user="ann"), ReplyFilter(task_id="sums"), ReplyFilter(task_id="sums", run_id="1")):
        assert everything(ledger, wanted) == theirs[::-1]
    assert everything(ledger, ReplyFilter(user="ann", task_id="other")) == []


def test_a_look_back_ends_and_goes_on(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reply_pages, "MAX_EXAMINED", 5)
    old = recorded(ledger, 2, run_id="old")
    recorded(ledger, 12)
    page = ledger.reply_pages.page(TENANT, ReplyFilter(run_id="old"), after=None, limit=3)
    assert page.rows == []
    assert page.back_to is not None
    assert everything(ledger, ReplyFilter(run_id="old")) == old[::-1]


def test_text_is_read_in_requests_and_replies_and_the_reading_ends(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reply_pages, "MAX_READ", 4)
    asked = recorded(ledger, 1, request=b'{"messages": [{"content": "Where is the ZEBRA?"}]}')
    answered = recorded(ledger, 1, experiences=(factories.experience(text="A zebra."),))
    recorded(ledger, 10)
    page = ledger.reply_pages.page(TENANT, ReplyFilter(text="zebra"), after=None, limit=3)
    assert page.rows == []
    assert page.back_to is not None
    assert everything(ledger, ReplyFilter(text="zebra")) == [*answered, *asked]


def test_states_and_rewards(ledger: Ledger):
    recorded(ledger, 2)
    rewarded = [each.msg_id for each in factories.rewarded(ledger, 2)]
    assert everything(ledger, ReplyFilter(state=State.REWARDED)) == rewarded[::-1]
    assert everything(ledger, ReplyFilter(reward_from=1.0, reward_to=1.0)) == rewarded[::-1]
    assert everything(ledger, ReplyFilter(reward_from=1.5)) == []


def test_an_exchange_is_shown_with_what_was_said_of_it(ledger: Ledger):
    [said] = factories.rewarded(ledger)
    ledger.recording.record([factories.feedback(msg_id=said.msg_id, kind=Kind.COMMENT, metric="comment", value=None,
                                                text="good")])  # fmt: skip
    view = ledger.exchange_views.get(TENANT, said.msg_id)
    assert view is not None
    assert [(each.kind, each.text) for each in view.events] == [("number", None), ("comment", "good")]
    assert view.replies[0].reward == 1.0
    assert view.replies[0].rule is not None
    tokens = ledger.exchange_views.tokens(TENANT, said.msg_id, 0)
    assert tokens is not None
    assert (tokens.prompt_tokens, tokens.completion_ids, tokens.logprobs) == (3, [4, 5], [-0.5, -0.25])
    assert ledger.exchange_views.tokens("another", said.msg_id, 0) is None


def test_the_newest_rewards_count_each_person_once(ledger: Ledger):
    for user, value in (("ann", 1.0), ("ann", 1.0), ("bob", 0.0)):
        said = factories.exchange(user=user)
        ledger.recording.record([said, factories.feedback(msg_id=said.msg_id, value=value)])
    found = ledger.reward_history.newest(0, among=100)
    assert (found.replies, found.units, found.mean) == (3, 2, pytest.approx(2 / 3))
    assert ledger.reward_history.newest(0, among=1).replies == 1
    assert ledger.reward_history.newest(5, among=10).replies == 0
    assert found.interval is not None
    assert 0 < found.interval[0] < 0.3 < 0.9 < found.interval[1] < 1
    assert ledger.reward_history.newest(0, among=1).interval is None


@pytest.mark.parametrize("good", [0, 1, 7, 12])
def test_the_interval_of_thumbs_is_wilsons_and_of_other_rewards_as_wide_as_they_are(ledger: Ledger, good: int):
    for at in range(12):
        said = factories.exchange(user=str(at))
        ledger.recording.record([said, factories.feedback(msg_id=said.msg_id, value=float(at < good))])
    found, wilson = ledger.reward_history.newest(0, among=100), binomtest(good, 12).proportion_ci(method="wilson")
    assert found.interval == pytest.approx((wilson.low, wilson.high), abs=1e-4)
    half = 1.96 * (found.variance / 12) ** 0.5
    other = found._replace(binary=False)
    assert other.interval == pytest.approx((other.mean - half, other.mean + half))


def answers(ledger: Ledger, *texts: str, request: bytes = b'{"messages": [{"content": "1+1="}]}') -> list[str]:
    said = [factories.exchange(request=request, experiences=(factories.experience(text=each),)) for each in texts]
    ledger.recording.record(said)
    return [each.msg_id for each in said]


def test_two_different_answers_to_one_prompt_are_a_pair_until_somebody_compared_them(ledger: Ledger):
    one, same, other = answers(ledger, "2", "2", "3")
    answers(ledger, "4", request=b'{"messages": [{"content": "2+2="}]}')
    pair = ledger.same_prompts.next_pair(TENANT, None)
    assert pair is not None
    assert {pair.one.msg_id, pair.other.msg_id} == {other, same}
    for better in (same, one):
        preferred = {"kind": Kind.PREFERENCE, "metric": "preference", "value": None, "other_msg_id": other}
        ledger.recording.record([factories.feedback(msg_id=better, **preferred)])
    assert ledger.same_prompts.next_pair(TENANT, None) is None


def test_what_was_sampled_with_makes_no_other_prompt():
    one = b'{"messages": [{"content": "a", "role": "user"}], "temperature": 1}'
    other = b'{"temperature": 0, "messages": [{"role": "user", "content": "a"}]}'
    assert digest_of_prompt(one) == digest_of_prompt(other)
    assert digest_of_prompt(b'{"messages": []}') != digest_of_prompt(one)
    assert digest_of_prompt(b"\xff") == digest_of_prompt(b"\xff") != digest_of_prompt(b"\xfe")


def long_request(question: str) -> bytes:
    return json.dumps({"messages": [{"content": question}], "padding": "a" * LARGE}).encode()


def test_no_page_holds_more_requests_than_a_listing_of_completions(ledger: Ledger):
    for number in range(MANY):
        recorded(ledger, 1, request=long_request(f"What is {number}?"))
    wanted = ReplyFilter()
    for read in (
        lambda: ledger.reply_pages.page(TENANT, wanted, after=None, limit=MANY),
        lambda: ledger.reply_pages.page(TENANT, ReplyFilter(text="nowhere"), after=None, limit=MANY),
        lambda: ledger.reply_pages.page(TENANT, ReplyFilter(text="what is"), after=None, limit=MANY),
        lambda: ledger.same_prompts.next_pair(TENANT, None),
        lambda: ledger.same_prompts.side_by_side(TENANT, 0, 0, limit=MANY),
    ):
        tracemalloc.start()
        read()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < LARGE * MANY * 0.9
    assert len(everything(ledger, wanted, limit=MANY)) == MANY
    assert len(everything(ledger, ReplyFilter(text="what is"), limit=MANY)) == MANY


def test_the_reading_of_texts_ends_by_their_bytes_too(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reply_pages, "MAX_READ_BYTES", LARGE)
    old = recorded(ledger, 1, experiences=(factories.experience(text="A zebra."),))
    recorded(ledger, 9, request=long_request("What is it?"))
    page = ledger.reply_pages.page(TENANT, ReplyFilter(text="zebra"), after=None, limit=3)
    assert page.rows == []
    assert page.back_to is not None
    assert everything(ledger, ReplyFilter(text="zebra")) == old
