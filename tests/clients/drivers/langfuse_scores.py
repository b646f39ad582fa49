"""Langfuse's client: scores go out in its own thread, and `flush` waits for them."""

import logging
import sys
from typing import Any

from langfuse import Langfuse
from serve import serve


class Client:
    def __init__(self, url: str) -> None:
        keys = {"public_key": "pk-lf-any", "secret_key": "sk-lf-any"}
        self._langfuse = Langfuse(**keys, host=url)
        self._said: list[str] = []
        logging.getLogger("langfuse").addHandler(_Listener(self._said))

    def score(self, **of: Any) -> list[str]:
        """Send a score; what the client logs of it."""
        self._said.clear()
        self._langfuse.create_score(**of)
        self._langfuse.flush()
        return list(self._said)

    def trace_of(self, seed: str) -> str:
        return self._langfuse.create_trace_id(seed=seed)

    def delete(self, score_id: str) -> bool:
        scores = getattr(self._langfuse.api, "scores", None) or self._langfuse.api.score
        scores.delete(score_id)
        return True


class _Listener(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


serve(Client(sys.argv[1]))
