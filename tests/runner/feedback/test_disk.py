"""What the disk refuses was not said; what the service refuses is set aside whole."""

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.running import eventually
from tests.runner.feedback.service import FeedbackService
from tuneloop.runner import Feedback, OutboxFull

SYNC = os.fsync


def rewards(service: FeedbackService) -> list[Any]:
    return [entry["reward"] for entry in service.entries]


@pytest.mark.parametrize(("number", "raised"), [(errno.EIO, OSError), (errno.ENOSPC, OutboxFull)])
def test_what_could_not_be_brought_to_disk_was_not_said(
    service: FeedbackService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raised: type[Exception]
) -> None:
    """The caller says it again, under another key: the service must get it once."""

    def refuse_syncs_of_outboxes(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".records"):
            raise OSError(number, "of the test")
        SYNC(descriptor)

    with Feedback(service.url, outbox=tmp_path) as feedback:
        monkeypatch.setattr(os, "fsync", refuse_syncs_of_outboxes)
        with pytest.raises(raised, match="of the test"):
            feedback.reward("a", 1)
        assert feedback.pending == 0
        monkeypatch.setattr(os, "fsync", SYNC)
        feedback.reward("a", 1)
        assert feedback.flush(30)
    assert rewards(service) == [1]


def test_what_cannot_be_set_aside_is_set_aside_later(
    service: FeedbackService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse_syncs_of_refusals(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("refused.jsonl"):
            raise OSError(errno.ENOSPC, "of the test")
        SYNC(descriptor)

    service.answer = lambda body: (404, {}, {"outcomes": {"a": "unknown"}})
    monkeypatch.setattr(os, "fsync", refuse_syncs_of_refusals)
    with caplog.at_level(logging.CRITICAL), Feedback(service.url, outbox=tmp_path) as feedback:
        feedback.comment("a", "kept")
        eventually(lambda: len(service.calls) >= 2)
        assert feedback.refused == 0
        assert "of the test" in str(feedback.trouble)
        monkeypatch.setattr(os, "fsync", SYNC)
        assert feedback.flush(30)
        assert [each.entry["comment"] for each in feedback.refusals()] == ["kept"]
        assert feedback.refused == 1
    [file] = tmp_path.rglob("refused.jsonl")
    assert file.stat().st_mode & 0o077 == 0
