"""A clock in the test's hand."""


class Clock:
    """Stands still until it is told otherwise; in seconds."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
