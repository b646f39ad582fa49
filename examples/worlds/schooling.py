"""Defines how a start model is taught, in a module without torch for the examples."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schooling:
    """First `early_steps` in which one conversation in three has slips, then at most `late_steps` in which all have.

    The late ones end as soon as no more than `goal` of the model's runs end right. `batch` is the conversations of a
    step; the learning rate rises to `rate`, and falls to `late_rate`.
    """

    early_steps: int
    late_steps: int
    goal: float = 0.0
    batch: int = 16
    rate: float = 3e-3
    late_rate: float = 5e-4
    rising_steps: int = 30

    def rate_at(self, step: int) -> float:
        """The learning rate of a step."""
        if step >= self.early_steps:
            return self.late_rate
        rising, falling = (step + 1) / self.rising_steps, 1.0 - step / self.early_steps
        return max(self.late_rate, self.rate * min(1.0, falling)) * min(1.0, rising)
