"""The sums of the demo: one question, one reply, reward 1 or 0."""

import random
from collections.abc import Iterator, Sequence

from examples.sums.task import ALL, Sum, judge
from examples.tasks.dialogue import Dialogue, Reply, Tool, Verdict

_SLIPS = 0.75


class Sums:
    """One-digit sums."""

    name = "sums"
    tools: Sequence[Tool] = ()
    max_tokens = 8
    reward_range = (0.0, 1.0)

    def questions(self) -> Sequence[Sum]:
        """The hundred sums."""
        return ALL

    def dialogue(self, question: Sum) -> Dialogue:
        """Ask and judge."""
        reply = yield [{"role": "user", "content": question.question}]
        reward = judge(question, reply.text)
        return Verdict(reward, reward == 1.0)

    def replies(self, question: Sum, slip: random.Random | None) -> Iterator[Reply]:
        """The sum, or another possible number."""
        wrong = slip is not None and slip.random() < _SLIPS
        yield Reply(str(slip.randrange(19)) if slip and wrong else question.answer)
