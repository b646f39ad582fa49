"""Defines the exceptions of the runner."""

import sys
from collections.abc import Mapping
from typing import Any


class JudgeError(Exception):
    """No verdict. `reason` is safe to log; the rest of the message quotes the judge."""

    def __init__(self, reason: str, quote: str = "") -> None:
        line = " ".join(quote.split())
        super().__init__(f"{reason}: {line[:200]}" if line else reason)
        self.reason = reason


class JudgeFailed(JudgeError):
    """The judge gave no usable verdict on this reply."""


class JudgeAway(JudgeError):
    """The judge is unavailable; `retry_after_s` is the wait that it asks for, if any."""

    def __init__(self, reason: str, quote: str = "", *, retry_after_s: float | None = None) -> None:
        super().__init__(reason, quote)
        self.retry_after_s = retry_after_s


class LogRefused(ValueError):
    """An unreadable log, trace or export; the message names the file and the line."""


class ServiceRefused(Exception):
    """A service that refused a request or did not answer; `status` and `code` are those of its answer."""

    def __init__(self, sentence: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code

    @classmethod
    def of_answer(cls, status: int, body: object) -> "ServiceRefused":
        """The refusal in an answer, in OpenAI's envelope or another form."""
        error = body.get("error") if isinstance(body, dict) else None
        fields = error if isinstance(error, dict) else {}
        sentence = fields.get("message") or f"the service answered {status}: {str(body)[:200]}"
        return cls(str(sentence), status=status, code=fields.get("code"))


class FeedbackError(Exception):
    """The root of feedback errors: some or all feedback was not accepted."""


class FeedbackRefused(FeedbackError):
    """The service will never accept it, by its `answer`. Other feedback of the call is stored."""

    def __init__(self, reason: str, answer: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.answer = dict(answer or {})


class FeedbackAway(FeedbackError):
    """The service is unavailable; `retry_after_s` is the wait that it asks for, if any."""

    def __init__(self, reason: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class OutboxFull(FeedbackError):
    """No room on disk. Feedback in the outbox is kept."""


class TuneError(Exception):
    """The root of the errors of tune()."""


class TuneRefused(TuneError, ValueError):
    """Inconsistent arguments of tune(); nothing was started."""


class TuneFailed(TuneError):
    """tune() stopped by one of its rules. `resume=True` continues from what was acknowledged."""


class ServiceAway(TuneFailed):
    """A service exited, or did not answer within `service_timeout`."""


class DatasetRefused(TuneRefused):
    """An unreadable or empty dataset; the message names the file and the line, or the splits."""


class ExtraMissing(ImportError):
    """A missing package; the message names the extra that installs it."""

    def __init__(self, extra: str, why: str) -> None:
        super().__init__(f'{why}: in a clone of tuneloop, pip install "./runner[{extra}]"')
        self.extra = extra


def say_without_traceback(error: Exception) -> None:
    """End the program with the error's message and no traceback, unless a caller catches the error."""
    usual = sys.excepthook
    sys.excepthook = lambda kind, raised, trace: (
        sys.stderr.write(f"{kind.__name__}: {raised}\n") if raised is error else usual(kind, raised, trace)
    )
