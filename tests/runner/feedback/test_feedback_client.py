"""The client against a real explorer: each thing that can be said becomes the event that it should."""

import logging
from contextlib import suppress
from pathlib import Path

import pytest

from tests.explorer.running import RunningExplorer
from tests.runner.feedback.service import FeedbackService
from tuneloop.runner import AsyncFeedback, Feedback, FeedbackAway, FeedbackRefused, WholeRun, reply_id

pytestmark = pytest.mark.contract

UNKNOWN = "chatcmpl-none"


def reply(explorer: RunningExplorer, **but: object) -> dict[str, str]:
    found: dict[str, str] = explorer.chat(**but).json()
    return found


def events(explorer: RunningExplorer) -> list[tuple[object, ...]]:
    return [tuple(row) for row in explorer.rows("SELECT kind, metric, value, text FROM feedback ORDER BY id")]


@pytest.mark.parametrize("through", ["outbox", "at once"])
def test_everything_that_can_be_said_reaches_the_ledger(
    explorer: RunningExplorer, tmp_path: Path, through: str
) -> None:
    outbox = tmp_path / "outbox" if through == "outbox" else None
    one, other = reply(explorer, n=2), reply(explorer, metadata={"task_id": "t", "run_id": "0"})
    with Feedback(explorer.url, outbox=outbox, source="app") as feedback:
        feedback.reward(one, 0.5, choice=0)
        feedback.thumbs_down(one, choice=1)
        feedback.label(one, "rude", metric="tone")
        feedback.comment(one, "That is another order.")
        feedback.edit(one, "It arrives on Monday.", choice=0)
        feedback.prefer(reply_id(one, 0), reply_id(one, 1))
        feedback.retract(one, metric="tone")
        feedback.reward(WholeRun("t", 0), 0.25)
        assert feedback.flush(30)
        assert (feedback.pending, feedback.sent, feedback.refused, feedback.trouble) == (0, 8, 0, None)
    assert events(explorer) == [
        ("number", "reward", 0.5, None),
        ("boolean", "reward", 0.0, None),
        ("label", "tone", None, "rude"),
        ("comment", "comment", None, "That is another order."),
        ("demonstration", "demonstration", None, "It arrives on Monday."),
        ("preference", "preference", None, None),
        ("retraction", "tone", None, None),
        ("number", "reward", 0.25, None),
    ]
    [(reward,)] = explorer.rows(f"SELECT reward FROM experiences WHERE msg_id = '{other['id']}'")
    assert reward == 0.25
    assert {row[0] for row in explorer.rows("SELECT source FROM feedback")} == {"app"}


@pytest.mark.parametrize("through", ["outbox", "at once"])
async def test_the_same_without_blocking(explorer: RunningExplorer, tmp_path: Path, through: str) -> None:
    outbox = tmp_path / "outbox" if through == "outbox" else None
    said = reply(explorer)
    async with AsyncFeedback(explorer.url, outbox=outbox) as feedback:
        receipt = await feedback.thumbs_up(said, key="k")
        async with feedback.batch() as many:
            many.comment(said, "good")
            many.label(said, "kind", metric="tone")
        assert await feedback.flush(30)
        assert await feedback.commit() == 1
        assert (feedback.pending, feedback.sent) == (0, 3)
    assert receipt.keys == ("k",)
    assert (receipt.answer.get("outcomes") == {said["id"]: "accepted"}) is (outbox is None)
    assert [kind for kind, *_ in events(explorer)] == ["boolean", "comment", "label"]


def test_the_answer_says_what_became_of_it(explorer: RunningExplorer) -> None:
    said = reply(explorer)
    with Feedback(explorer.url) as feedback:
        assert feedback.reward(said, 1, key="k").answer["outcomes"] == {said["id"]: "accepted"}
        assert feedback.reward(said, 0, key="k").answer["outcomes"] == {said["id"]: "duplicate"}
        assert feedback.commit() == 1


def test_with_a_key_the_same_thing_is_taken_once_whatever_is_said_between(
    explorer: RunningExplorer, tmp_path: Path
) -> None:
    said = reply(explorer)
    with Feedback(explorer.url, outbox=tmp_path / "o") as feedback:
        for value, key in ((1, "k"), (0, "other"), (1, "k"), (0.5, None)):
            feedback.reward(said, value, **({"key": key} if key else {}))
        assert feedback.flush(30)
    assert [value for _, _, value, _ in events(explorer)] == [1, 0, 0.5]


def test_a_batch_is_one_call(service: FeedbackService, tmp_path: Path) -> None:
    for outbox in (None, tmp_path):
        with Feedback(service.url, outbox=outbox) as feedback, feedback.batch() as many:
            many.reward("chatcmpl-a", 1)
            many.comment("chatcmpl-a", "good")
    assert [len(call["feedback"]) for call in service.calls] == [2, 2]


def test_a_batch_that_is_left_by_an_error_is_not_sent(service: FeedbackService) -> None:
    with Feedback(service.url) as feedback, suppress(RuntimeError), feedback.batch() as many:
        many.reward("chatcmpl-a", 1)
        raise RuntimeError
    assert service.calls == []


def test_an_unknown_id_is_refused(explorer: RunningExplorer) -> None:
    said = reply(explorer)
    with Feedback(explorer.url) as feedback:
        with pytest.raises(FeedbackRefused, match=UNKNOWN):
            feedback.reward(UNKNOWN, 1)
        with pytest.raises(FeedbackRefused) as refused:
            feedback.reward([UNKNOWN, said], 1)
    assert refused.value.answer["outcomes"] == {UNKNOWN: "unknown", said["id"]: "accepted"}


@pytest.mark.parametrize("through", ["outbox", "at once"])
def test_what_is_not_kept_any_more_is_refused(service: FeedbackService, tmp_path: Path, through: str) -> None:
    service.answers = [(200, {}, {"outcomes": {"a": "accepted", "b": "full"}})]
    with Feedback(service.url, outbox=tmp_path if through == "outbox" else None) as feedback:
        if through == "at once":
            with pytest.raises(FeedbackRefused, match="the reply has as much feedback as the service keeps: a, b"):
                feedback.reward(["a", "b"], 1)
        else:
            with feedback.batch() as many:
                many.reward("a", 1)
                many.reward("b", 1)
            assert feedback.flush(30)
            assert [each.entry["msg_ids"] for each in feedback.refusals()] == [["b"]]
            assert (feedback.sent, feedback.refused) == (1, 1)


async def test_a_service_that_is_away_is_told_at_once(service: FeedbackService) -> None:
    service.answers = [(503, {"retry-after": "7"}, {"error": {"message": "full"}}), (404, {}, "no such page")] * 2
    with Feedback(service.url) as feedback:
        for wait in (7.0, None):
            with pytest.raises(FeedbackAway) as away:
                feedback.reward("a", 1)
            assert away.value.retry_after_s == wait
    async with AsyncFeedback(service.url) as unblocked:
        for _ in range(2):
            with pytest.raises(FeedbackAway):
                await unblocked.reward("a", 1)
    with Feedback("http://127.0.0.1:9") as nowhere:
        with pytest.raises(FeedbackAway):
            nowhere.reward("a", 1)
        with pytest.raises(FeedbackAway):
            nowhere.commit()
    async with AsyncFeedback("http://127.0.0.1:9") as nowhere_unblocked:
        with pytest.raises(FeedbackAway):
            await nowhere_unblocked.commit()


def test_the_url_may_be_the_one_of_openais_clients_and_a_key_is_sent(service: FeedbackService) -> None:
    with Feedback(f"{service.url}/v1/", api_key="secret") as feedback:
        feedback.reward("a", 1)
        assert feedback.commit() == 3
    assert service.keys == ["Bearer secret"]


@pytest.mark.parametrize("url", ["localhost:8010", "", "ftp://host", "http://a:b:c"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="absolute URL"):
        Feedback(url)


def test_poison_never_blocks_others(
    explorer: RunningExplorer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = reply(explorer)
    with caplog.at_level(logging.CRITICAL), Feedback(explorer.url, outbox=tmp_path / "o") as feedback:
        feedback.reward(UNKNOWN, 1)
        feedback.label(said, "a", metric="m0")
        feedback.edit(said, {"role": "user", "content": "x"})
        feedback.prefer(said, f"{said['id']}:0")
        feedback.reward(f"{said['id']}:9", 1)
        feedback.label(said, "b", metric="m1")
        assert feedback.flush(30)
        assert (feedback.pending, feedback.sent, feedback.refused) == (0, 2, 4)
        refused = feedback.refusals()
    assert [metric for _, metric, *_ in events(explorer)] == ["m0", "m1"]
    assert sorted(each.reason[:3] for each in refused) == ["400", "400", "404", "404"]
    assert {"demonstration", "preferred_over"} <= {name for each in refused for name in each.entry}


def test_what_is_taken_of_a_reply_is_not_set_aside_with_what_is_not(
    explorer: RunningExplorer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = reply(explorer)
    with caplog.at_level(logging.CRITICAL), Feedback(explorer.url, outbox=tmp_path / "o") as feedback:
        with feedback.batch() as many:
            many.thumbs_up(said)
            many.prefer(said, UNKNOWN)
            many.comment(said, "good")
        assert feedback.flush(30)
        assert (feedback.sent, feedback.refused) == (2, 1)
        assert [each.entry["preferred_over"] for each in feedback.refusals()] == [UNKNOWN]
    assert sorted(str(kind) for kind, *_ in events(explorer)) == ["boolean", "comment"]


@pytest.mark.parametrize("through", ["outbox", "at once"])
def test_what_is_not_kept_any_more_of_a_run_is_refused(
    service: FeedbackService, tmp_path: Path, caplog: pytest.LogCaptureFixture, through: str
) -> None:
    service.answer = lambda body: (200, {}, {"outcomes": {"t/0": "full"}})
    outbox = tmp_path if through == "outbox" else None
    with caplog.at_level(logging.CRITICAL), Feedback(service.url, outbox=outbox) as feedback:
        if through == "at once":
            with pytest.raises(FeedbackRefused, match="as the service keeps: t/0"):
                feedback.reward(WholeRun("t", 0), 1)
        else:
            feedback.reward(WholeRun("t", 0), 1)
            assert feedback.flush(30)
            assert [each.entry["task_id"] for each in feedback.refusals()] == ["t"]
        assert feedback.sent == 0
