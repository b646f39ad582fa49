"""The outbox of feedback: what is in it is sent, whatever happens to the app, to the service and to the files."""

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.explorer.running import eventually
from tests.runner.feedback.service import Answer, FeedbackService, Json, feedback_service, taken
from tuneloop.runner import Feedback, OutboxFull
from tuneloop.runner.feedback import feedback_outbox, sender
from tuneloop.runner.outbox import Outbox


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(sender, "_LOOK_S", 0.1)
    monkeypatch.setattr(sender, "_FIRST_PAUSE_S", 0.02)
    with caplog.at_level(logging.CRITICAL):
        yield


def rewards(service: FeedbackService) -> list[float]:
    return [entry["reward"] for entry in service.entries]


def stop(feedback: Feedback) -> None:
    """End it while something waits, as the end of its process does."""
    feedback.close(0)
    thread = feedback._sender._thread  # type: ignore[union-attr]
    eventually(lambda: thread is None or not thread.is_alive())


def files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.is_file())


def away(body: Json) -> Answer:
    return 503, {}, "away"


def test_what_is_said_while_the_service_is_away_is_sent_when_it_is_back(tmp_path: Path) -> None:
    with feedback_service() as found:
        port = int(found.url.rpartition(":")[2])
    with Feedback(found.url, outbox=tmp_path) as feedback:
        for value in range(5):
            feedback.reward("a", value)
        eventually(lambda: feedback.trouble is not None)
        assert (feedback.pending, feedback.sent) == (5, 0)
        with feedback_service(port) as back:
            assert feedback.flush(30)
        assert rewards(back) == [0, 1, 2, 3, 4]
        assert (feedback.pending, feedback.sent, feedback.trouble) == (0, 5, None)
    assert files(tmp_path) == []


def test_the_next_process_sends_what_was_left_before_its_own(service: FeedbackService, tmp_path: Path) -> None:
    service.answer = away
    with Feedback(service.url, outbox=tmp_path) as first:
        first.reward("a", 1)
        stop(first)
    service.answer = taken
    with Feedback(service.url, outbox=tmp_path) as second:
        second.reward("a", 2)
        assert second.flush(30)
    assert list(dict.fromkeys(rewards(service))) == [1, 2]
    assert files(tmp_path) == []


def test_the_service_says_when_to_come_back(service: FeedbackService, tmp_path: Path) -> None:
    service.answers = [(status, {"retry-after": "0.2"}, "later") for status in (429, 503)]
    started = time.monotonic()
    with Feedback(service.url, outbox=tmp_path) as feedback:
        feedback.reward("a", 1)
        eventually(lambda: feedback.sent == 1)
    assert time.monotonic() - started >= 0.4
    assert len({str(call) for call in service.calls}) == 1


def test_a_stranger_between_us_and_the_service_poisons_nothing(service: FeedbackService, tmp_path: Path) -> None:
    strange: list[Answer] = [(404, {}, "<html>"), (400, {}, "no"), (401, {}, {"error": "key"}), (200, {}, "welcome")]
    service.answers = [*strange, (301, {}, ""), (500, {}, "[")]
    with Feedback(service.url, outbox=tmp_path) as feedback:
        feedback.reward("a", 1)
        eventually(lambda: feedback.sent == 1)
        assert feedback.refused == 0


def test_a_call_that_is_too_large_is_halved_until_it_is_not(service: FeedbackService, tmp_path: Path) -> None:
    def narrow(body: Json) -> Answer:
        return (413, {}, "too large") if len(body["feedback"]) > 3 else taken(body)

    service.answer = narrow
    with Feedback(service.url, outbox=tmp_path) as feedback:
        with feedback.batch() as many:
            for value in range(20):
                many.reward("a", value)
        assert feedback.flush(30)
    sent = [entry["reward"] for call in service.calls if len(call["feedback"]) <= 3 for entry in call["feedback"]]
    assert sent == list(range(20))


def test_entries_that_are_refused_are_found_and_set_aside(service: FeedbackService, tmp_path: Path) -> None:
    def strict(body: Json) -> Answer:
        odd = any(entry["reward"] % 7 == 0 for entry in body["feedback"])
        return (400, {}, {"error": {"message": "a seven", "param": None}}) if odd else taken(body)

    service.answer = strict
    with Feedback(service.url, outbox=tmp_path) as feedback:
        with feedback.batch() as many:
            for value in range(50):
                many.reward("a", value)
        assert feedback.flush(30)
        assert (feedback.sent, feedback.refused) == (42, 8)
        assert [each.entry["reward"] for each in feedback.refusals()] == [0, 7, 14, 21, 28, 35, 42, 49]


def test_many_entries_go_in_few_calls_in_their_order(service: FeedbackService, tmp_path: Path) -> None:
    service.answer = away
    with Feedback(service.url, outbox=tmp_path) as feedback:
        for value in range(1200):
            feedback.reward("a", value)
        eventually(lambda: feedback.trouble is not None)
        first = service.calls[-1]
        service.answer, service.calls = taken, []
        assert feedback.flush(60)
    assert rewards(service) == list(range(1200))
    assert len(service.calls) <= 4
    assert len(first["feedback"]) <= 500


def test_a_full_outbox_says_so_and_keeps_what_it_has(service: FeedbackService, tmp_path: Path) -> None:
    service.answer = away
    with Feedback(service.url, outbox=tmp_path, max_bytes=2000) as feedback:
        with suppress(OutboxFull):
            for value in range(100):
                feedback.reward("a", value)
        with pytest.raises(OutboxFull, match="max_bytes is 2000"):
            feedback.reward("a", 1)
        kept = feedback.pending
        assert 5 < kept < 50
        service.answer, service.calls = taken, []
        assert feedback.flush(30)
        feedback.reward("a", 1)
        assert feedback.flush(30)
    assert len(service.entries) == kept + 1


def test_the_bound_is_of_all_processes_together(service: FeedbackService, tmp_path: Path) -> None:
    service.answer = away
    with Feedback(service.url, outbox=tmp_path) as one, Feedback(service.url, outbox=tmp_path, max_bytes=300) as two:
        one.comment("a", "x" * 1000)
        eventually(lambda: two._sender.outbox._others_bytes > 1000)  # type: ignore[union-attr]
        with pytest.raises(OutboxFull):
            two.reward("a", 1)
        stop(one)
        stop(two)


def test_a_damaged_record_costs_itself_alone_and_stays_to_be_looked_at(
    service: FeedbackService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service.answer = away
    with Feedback(service.url, outbox=tmp_path) as feedback:
        for value in range(3):
            feedback.reward("a", value)
        stop(feedback)
    [path] = (each for each in files(tmp_path) if each.suffix == ".records")
    damaged = path.read_bytes().replace(b": 1.0}", b": 9.0}")
    path.write_bytes(damaged)
    service.answer, service.calls = taken, []
    with caplog.at_level(logging.ERROR), Feedback(service.url, outbox=tmp_path) as feedback:
        assert feedback.flush(30)
    assert rewards(service) == [0, 2]
    [kept] = files(tmp_path)
    found = kept.read_bytes()
    offset = damaged.index(found)
    assert b"9.0" in found
    assert kept == path.with_name(f"{path.stem}.{offset}.damaged")
    assert f"{len(found)} bytes of {path} from byte {offset} on are damaged" in caplog.text
    assert kept.stat().st_mode & 0o077 == 0


def test_what_was_sent_leaves_the_disk_while_more_is_said(
    service: FeedbackService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback_outbox, "_FILE_BYTES", 1000)
    with Feedback(service.url, outbox=tmp_path) as feedback:
        for value in range(100):
            feedback.reward("a", value)
            feedback.flush(30)
            assert sum(each.stat().st_size for each in files(tmp_path)) < 3000
    assert rewards(service) == list(range(100))


def test_a_file_that_cannot_be_taken_over_stops_nothing(
    service: FeedbackService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), Feedback(service.url, outbox=tmp_path) as feedback:
        folder = feedback._sender.outbox.folder  # type: ignore[union-attr]
        (folder / "00000000000000000001-aaaaaaaa-0123456789abcdef.records").mkdir()
        other = Outbox(folder, 1000)
        other.append([b"no JSON"])
        other.close()
        eventually(lambda: caplog.text.count("cannot be sent") == 2)
        feedback.reward("a", 1)
        assert feedback.flush(30)
        time.sleep(0.3)
    assert caplog.text.count("cannot be sent") == 2
    assert rewards(service) == [1]


def test_a_flush_waits_for_what_a_process_before_has_left(
    service: FeedbackService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.answer = away
    with Feedback(service.url, outbox=tmp_path) as feedback:
        feedback.reward("a", 1)
        stop(feedback)
    look = feedback_outbox.FeedbackOutbox.look

    def look_late(self: feedback_outbox.FeedbackOutbox) -> None:
        time.sleep(0.2)
        look(self)

    monkeypatch.setattr(feedback_outbox.FeedbackOutbox, "look", look_late)
    service.answer, service.calls = taken, []
    with Feedback(service.url, outbox=tmp_path) as feedback:
        assert feedback.flush(5)
        assert [len(call["feedback"]) for call in service.calls] == [1]
