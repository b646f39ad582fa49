"""What the runner raises."""

import sys
from collections.abc import Mapping
from typing import Any


class JudgeError(Exception):
    """There is no verdict. `reason` may be logged anywhere; what follows it in the message quotes the judge."""

    def __init__(self, reason: str, quote: str = "") -> None:
        line = " ".join(quote.split())
        super().__init__(f"{reason}: {line[:200]}" if line else reason)
        self.reason = reason


class JudgeFailed(JudgeError):
    """The judge gave no usable verdict on this one."""


class JudgeAway(JudgeError):
    """The judge is not there; `retry_after_s` is how long it asks us to wait, if it says so."""

    def __init__(self, reason: str, quote: str = "", *, retry_after_s: float | None = None) -> None:
        super().__init__(reason, quote)
        self.retry_after_s = retry_after_s


class LogRefused(ValueError):
    """A log, a trace or an export that cannot be read; the message names the file, and the line where there is one."""


class ServiceRefused(Exception):
    """A service that does not answer, or not with what was asked for; `status` and `code` are those of its answer."""

    def __init__(self, sentence: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code

    @classmethod
    def of_answer(cls, status: int, body: object) -> "ServiceRefused":
        """The refusal in OpenAI's envelope, or what there is of one."""
        error = body.get("error") if isinstance(body, dict) else None
        fields = error if isinstance(error, dict) else {}
        sentence = fields.get("message") or f"the service answered {status}: {str(body)[:200]}"
        return cls(str(sentence), status=status, code=fields.get("code"))


class FeedbackError(Exception):
    """The root: what was said was not taken, or not all of it."""


class FeedbackRefused(FeedbackError):
    """The service will never take it; `answer` is what it says of it. What it did take of the call is stored."""

    def __init__(self, reason: str, answer: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.answer = dict(answer or {})


class FeedbackAway(FeedbackError):
    """The service did not take it now; `retry_after_s` is how long it asks us to wait, if it says so."""

    def __init__(self, reason: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class OutboxFull(FeedbackError):
    """There is no room for it on disk. Nothing of what waits there is lost."""


class TuneError(Exception):
    """The root of what `tune()` raises by itself."""


class TuneRefused(TuneError, ValueError):
    """The arguments of `tune()` are inconsistent; nothing was started."""


class TuneFailed(TuneError):
    """Tuning was stopped by one of its rules. What was acknowledged is kept, and `resume=True` goes on."""


class ServiceAway(TuneFailed):
    """A service ended, or did not answer for longer than `service_timeout`."""


class DatasetRefused(TuneRefused):
    """A dataset that cannot be read, or has no task: the message names the file and the line, or the splits."""


class ExtraMissing(ImportError):
    """A package that is not installed, and which extra of ours installs it."""

    def __init__(self, extra: str, why: str) -> None:
        super().__init__(f'{why}: in a clone of tuneloop, pip install "./runner[{extra}]"')
        self.extra = extra


def say_without_traceback(error: Exception) -> None:
    """If the error is not caught, end the program with its sentence: the traceback would be of our own lines."""
    usual = sys.excepthook
    sys.excepthook = lambda kind, raised, trace: (
        sys.stderr.write(f"{kind.__name__}: {raised}\n") if raised is error else usual(kind, raised, trace)
    )
