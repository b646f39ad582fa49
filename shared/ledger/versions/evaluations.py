"""The verbs for those who look at versions: what each was trained on, and how it was evaluated."""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import delete, func, insert, select

from tuneloop.shared.evaluation.scores import Figure
from tuneloop.shared.experience import Evaluator
from tuneloop.shared.ledger.storage.database import LedgerPart, alone
from tuneloop.shared.ledger.storage.schema import evaluations, experiences


class Evaluation(NamedTuple):
    """A row of `evaluations`; `slice` is empty for all tasks together."""

    version: int
    evaluator: Evaluator
    metric: str
    slice: str
    value: float
    deviation: float
    samples: int
    evaluated_at: float


class Evaluations(LedgerPart):
    def trained_on(self, version: int) -> dict[int, int]:
        """How many rows the version was trained on, by the version that began them; those since deleted are missing."""
        sampled = experiences.c.version_min
        query = select(sampled, func.count()).where(experiences.c.trained_version == version)
        return {row[0]: row[1] for row in self._read(query.group_by(sampled).order_by(sampled))}

    def of_versions(self, versions: Sequence[int]) -> list[Evaluation]:
        columns = (evaluations.c[name] for name in Evaluation._fields)
        order = (evaluations.c[name] for name in ("metric", "slice", "evaluator", "version"))
        rows = self._read(select(*columns).where(evaluations.c.version.in_(versions)).order_by(*order))
        return [Evaluation(*row)._replace(evaluator=Evaluator(row.evaluator)) for row in rows]

    def record(self, version: int, evaluator: Evaluator, figures: Sequence[Figure]) -> None:
        key = {"version": version, "evaluator": evaluator, "evaluated_at": self._clock()}
        with self._write() as connection:
            alone(connection, "evaluations")
            before = evaluations.c.version == version, evaluations.c.evaluator == evaluator
            connection.execute(delete(evaluations).where(*before))
            if figures:
                connection.execute(insert(evaluations), [key | each._asdict() for each in figures])

    def of(self, version: int, evaluator: Evaluator) -> tuple[Figure, ...]:
        """What the evaluator found of the version last; nothing if it never looked."""
        columns = [evaluations.c[name] for name in Figure._fields]
        of_it = evaluations.c.version == version, evaluations.c.evaluator == evaluator
        rows = self._read(select(*columns).where(*of_it).order_by(evaluations.c.metric, evaluations.c.slice))
        return tuple(Figure(*row) for row in rows)
