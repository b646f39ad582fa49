"""A judge that is asked with two texts, a user's input and an agent's response."""

import os
from collections.abc import Mapping
from typing import Any

from tuneloop.runner.judging.judge import Judge, Verdict
from tuneloop.runner.judging.rubric import DEFAULT_CRITERIA
from tuneloop.runner.rewards.reply import Reply

_TOTAL = "total"


class LLMJudge:
    """A model that scores a response by criteria. `rules` are further arguments of a Judge, such as `samples`.

    Without `base_url` and `api_key` it is asked where OPENAI_BASE_URL and OPENAI_API_KEY say.
    """

    def __init__(
        self,
        model: str,
        criteria: Mapping[str, str] | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        **rules: Any,
    ) -> None:
        """Raises ValueError for what makes no sense, and where nothing says whom conversations are sent to."""
        url = base_url or os.environ.get("OPENAI_BASE_URL")
        if not url:
            raise ValueError("base_url: name the endpoint that judges, here or in OPENAI_BASE_URL")
        named = dict(criteria or DEFAULT_CRITERIA)
        if _TOTAL in named:
            raise ValueError("no criterion may be called total: that is the mean of all")
        key = api_key or os.environ.get("OPENAI_API_KEY")
        self.judge = Judge(base_url=url, model=model, api_key=key, criteria=named, **rules)

    def evaluate(self, user_input: str, agent_response: str) -> dict[str, float]:
        """The score of each criterion, and their weighted mean as `total`; 1 to 5 unless the scale is another.

        Raises JudgeFailed if there is no usable verdict, JudgeAway if the judge is not there.
        """
        return _by_name(self.judge.score(_reply(user_input, agent_response)))

    async def evaluate_async(self, user_input: str, agent_response: str) -> dict[str, float]:
        """The same without blocking. Use it in one event loop only."""
        return _by_name(await self.judge.score_async(_reply(user_input, agent_response)))

    def close(self) -> None:
        """Close the connections that blocking questions were asked over."""
        self.judge.close()

    async def close_async(self) -> None:
        """Close all connections."""
        await self.judge.close_async()


def _reply(user_input: str, agent_response: str) -> Reply:
    return Reply(text=agent_response, messages=({"role": "user", "content": user_input},))


def _by_name(verdict: Verdict) -> dict[str, float]:
    return {**verdict.scores, _TOTAL: verdict.total}
