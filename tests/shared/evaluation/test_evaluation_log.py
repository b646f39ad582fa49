"""A long evaluation says how far it is, a short one nothing."""

from structlog.testing import capture_logs

from tuneloop.shared.evaluation.evaluation_log import EVERY_S, EvaluationProgress


def test_a_line_tells_how_many_are_answered_and_the_end_is_not_told_twice() -> None:
    now = 0.0
    with capture_logs() as lines:
        progress = EvaluationProgress(5, clock=lambda: now)
        progress.add()
        now = EVERY_S
        progress.add(2)
        progress.add()
        now = 2 * EVERY_S
        progress.add()  # all of it: what comes of it is a line of its own
    assert lines == [{"event": "evaluating", "answered": 3, "of": 5, "log_level": "info"}]
