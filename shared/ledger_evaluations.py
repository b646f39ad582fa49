"""The verbs about evaluations: how a version did on tasks that nothing is trained on."""

from collections.abc import Sequence

from sqlalchemy import delete, insert, select

from shared.evaluation_figures import Figure
from shared.experience import Evaluator
from shared.ledger_transactions import Transactions, alone
from shared.schema import evaluations


class Evaluations(Transactions):
    """Figures of versions."""

    def record_evaluation(self, version: int, evaluator: Evaluator, figures: Sequence[Figure]) -> None:
        """Keep what the evaluator found of the version, instead of what it found before."""
        key = {"version": version, "evaluator": evaluator, "evaluated_at": self._clock()}
        with self._write() as connection:
            alone(connection, "evaluations")
            before = evaluations.c.version == version, evaluations.c.evaluator == evaluator
            connection.execute(delete(evaluations).where(*before))
            if figures:
                connection.execute(insert(evaluations), [key | each._asdict() for each in figures])

    def evaluation(self, version: int, evaluator: Evaluator) -> tuple[Figure, ...]:
        """What the evaluator found of the version last; nothing if it never looked."""
        columns = [evaluations.c[name] for name in Figure._fields]
        of_it = evaluations.c.version == version, evaluations.c.evaluator == evaluator
        rows = self._read(select(*columns).where(*of_it).order_by(evaluations.c.metric, evaluations.c.slice))
        return tuple(Figure(*row) for row in rows)
