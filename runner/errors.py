"""What a judge raises.

JudgeError
├── JudgeFailed   no verdict on this reply: the judge's answer makes no sense, or it refuses the question
└── JudgeAway     no verdict on any reply for now: the judge cannot be reached, is overloaded, or does not let us in
"""


class JudgeError(Exception):
    """The root: there is no verdict, and no number stands in for one.

    `reason` may be logged anywhere; what follows it in the message quotes the judge, who may quote what it judges.
    """

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
