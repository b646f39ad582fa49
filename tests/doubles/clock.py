"""A clock in the test's hand."""


class Clock:
    """A clock in seconds that stands still until the test moves it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
