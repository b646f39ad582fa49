"""What became of feedback."""

from collections.abc import Collection

import msgspec

from tuneloop.shared.experience import Outcome


class FeedbackResults(msgspec.Struct):
    """By event ids."""

    outcomes: dict[str, Outcome] = {}
    apart: dict[str, dict[str, Outcome]] = {}
    not_trained: dict[str, dict[int, str]] = {}
    of_runs: dict[str, list[str]] = {}

    def add(self, other: "FeedbackResults", event_ids: Collection[str]) -> None:
        """Take over what is told of these events."""
        for event_id in event_ids:
            self.outcomes[event_id] = other.outcomes[event_id]
            for own, its in ((self.apart, other.apart), (self.of_runs, other.of_runs)):
                if event_id in its:
                    own[event_id] = its[event_id]
        self.not_trained.update(other.not_trained)
