"""Figures of versions in the ledger."""

from pathlib import Path

import pytest

from tuneloop.shared.errors import LedgerError
from tuneloop.shared.evaluation.scores import Figure
from tuneloop.shared.experience import Evaluator
from tuneloop.shared.ledger.ledger import Ledger

SCORE = Figure("score", "", 0.5, 0.1, 4)
SLICE = Figure("score", "sums", 0.25, 0.0, 2)


def test_figures_are_told_as_they_were_recorded_and_replaced_as_a_whole(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/base"))
    assert ledger.evaluations.of(0, Evaluator.TRAINER) == ()
    ledger.evaluations.record(0, Evaluator.TRAINER, [SLICE, SCORE])
    assert ledger.evaluations.of(0, Evaluator.TRAINER) == (SCORE, SLICE)
    ledger.evaluations.record(0, Evaluator.TRAINER, [SCORE._replace(value=0.75)])
    assert ledger.evaluations.of(0, Evaluator.TRAINER) == (SCORE._replace(value=0.75),)


@pytest.mark.parametrize("figure", [SCORE._replace(value=float("inf")), SCORE._replace(samples=0)])
def test_what_is_no_figure_is_refused_and_the_old_ones_stay(ledger: Ledger, figure: Figure) -> None:
    ledger.versions.ensure_base(Path("/base"))
    ledger.evaluations.record(0, Evaluator.TRAINER, [SCORE])
    with pytest.raises(LedgerError):
        ledger.evaluations.record(0, Evaluator.TRAINER, [figure])
    assert ledger.evaluations.of(0, Evaluator.TRAINER) == (SCORE,)
