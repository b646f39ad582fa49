"""In which order policies are trained that have a batch waiting."""

from collections.abc import Collection

from tuneloop.shared.ledger.training.training import WaitingRows


class PolicyTurns:
    """A turn is a version. In a round each policy that has a batch has one, so that none waits for ever.

    Among those that have had none in the round, the one whose oldest row has waited longest is next.
    """

    def __init__(self) -> None:
        #: Those that have had one in the round, the last of them last.
        self._had: list[int] = []

    def order(self, ready: Collection[WaitingRows]) -> list[int]:
        """The policies by their numbers, whose turn it is first; a new round begins with any but the last of this."""

        def place(each: WaitingRows) -> tuple[bool, bool, float, int]:
            number = each.policy.id
            return number in self._had, number in self._had[-1:], -each.seconds, number

        return [each.policy.id for each in sorted(ready, key=place)]

    def note(self, policy: int) -> None:
        """A version of the policy was made."""
        self._had = [policy] if policy in self._had else [*self._had, policy]
