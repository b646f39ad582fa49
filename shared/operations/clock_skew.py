"""How far clocks are off the ledger's time. Nothing is aged by them, but people read them, and logs."""

from typing import NamedTuple

#: The alarm's name.
CLOCK_SKEW = "clock_skew"

#: Seconds by which a clock may be off before somebody should look.
ALLOWED_S = 5.0


class ClockSkew(NamedTuple):
    """By how many seconds this machine's clock and the database's are ahead of the ledger's time."""

    machine_s: float
    database_s: float

    @property
    def wrong(self) -> bool:
        """Whether somebody should look after one of them."""
        return max(abs(self.machine_s), abs(self.database_s)) > ALLOWED_S

    @property
    def sentence(self) -> str:
        """The differences in words."""
        return f"this machine's is {_off(self.machine_s)}, the database's {_off(self.database_s)}"


def _off(seconds: float) -> str:
    if abs(seconds) <= ALLOWED_S:
        return "right"
    return f"{abs(seconds):.0f} s {'ahead' if seconds > 0 else 'behind'}"
