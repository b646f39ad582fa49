"""The explorer compares raters by itself, and shows what came of it."""

from pathlib import Path

from tests.explorer.running import settings_for
from tests.factories import exchange, feedback
from tuneloop.explorer.feedback.rater_assessment import RaterAssessment
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.ledger.ledger import Ledger


async def test_an_outlier_is_put_into_quarantine_and_counted(tmp_path: Path, ledger: Ledger) -> None:
    said = [exchange() for _ in range(60)]
    ledger.recording.record(said)
    for number, each in enumerate(said):
        good = float(number % 2)
        verdicts = {"ann": good, "ben": good, "liar": 1 - good}
        ledger.recording.record(
            [feedback(msg_id=each.msg_id, source=name, value=value) for name, value in verdicts.items()]
        )
    metrics = Metrics()
    await RaterAssessment(settings_for(tmp_path, ["http://nowhere"]), ledger, metrics).turn()
    counts = {
        state: metrics.registry.get_sample_value("tuneloop_raters", {"state": state})
        for state in ("active", "quarantined")
    }
    assert counts == {"active": 2.0, "quarantined": 1.0}
