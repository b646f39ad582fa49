"""Scores replies by criteria with a language model."""

import asyncio
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuneloop.runner.errors import JudgeError, JudgeFailed
from tuneloop.runner.judging.endpoint import Answer, Endpoint
from tuneloop.runner.judging.prompts import Prompt, object_in, scores_in, scoring_prompt, words_in
from tuneloop.runner.judging.rubric import DEFAULT_CRITERIA, Rubric
from tuneloop.runner.rewards.reply import Reply

_MOST_CHOICES = 100  # largest number of scores listed as an enum in the schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judge's verdict on a reply.

    `scores` and their weighted mean `total` are on the rubric's scale; `shares` and `normalised` are the same in [0,
    1]. Several samples are averaged. `reason` is the judge's text.
    """

    scores: Mapping[str, float]
    total: float
    shares: Mapping[str, float]
    normalised: float
    reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(kw_only=True)
class Judge:
    """A judge model with a rubric. Several `samples` need a `temperature` above 0."""

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    criteria: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_CRITERIA))
    weights: Mapping[str, float] = field(default_factory=dict)
    scale: tuple[int, int] = (1, 5)
    samples: int = 1
    temperature: float | None = 0.0
    timeout: float = 60.0
    retries: int = 2
    concurrency: int = 8

    def __post_init__(self) -> None:
        """Raises ValueError."""
        self.rubric = Rubric(criteria=self.criteria, weights=self.weights, scale=self.scale)
        if self.samples < 1:
            raise ValueError("samples must be at least 1")
        names = ("base_url", "model", "api_key", "temperature", "timeout", "retries", "concurrency")
        self.endpoint = Endpoint(**{name: getattr(self, name) for name in names})

    def score(self, reply: Reply) -> Verdict:
        """Judge a reply. Raises JudgeFailed without a usable verdict, JudgeAway if the judge is unavailable."""
        question = self._question(reply)
        return self._verdict([self.endpoint.ask(*question) for _ in range(self.samples)])

    async def score_async(self, reply: Reply) -> Verdict:
        """As `score`, async. Use it in one event loop only."""
        question = self._question(reply)
        return self._verdict(await _all([self.endpoint.ask_async(*question) for _ in range(self.samples)]))

    def reward(self, reply: Reply) -> float:
        """The verdict in [0, 1], as a component of a Composite."""
        return self.score(reply).normalised

    def close(self) -> None:
        self.endpoint.close()

    async def close_async(self) -> None:
        await self.endpoint.close_async()

    def _question(self, reply: Reply) -> tuple[Prompt, dict[str, Any]]:
        try:
            low, high = self.rubric.scale
            choices = {"enum": list(range(low, high + 1))} if high - low < _MOST_CHOICES else {}
            names = list(self.rubric.criteria)
            scores = {
                "type": "object",
                "properties": {name: {"type": "integer", **choices} for name in names},
                "required": names,
                "additionalProperties": False,
            }
            schema = {
                "type": "object",
                "properties": {"reason": {"type": "string"}, "scores": scores},
                "required": ["reason", "scores"],
                "additionalProperties": False,
            }
            return scoring_prompt(reply, self.rubric.criteria, self.rubric.scale), schema
        except RecursionError:
            raise JudgeFailed("the reply, or what it answers, is nested too deeply to be shown") from None

    def _verdict(self, answers: Sequence[Answer]) -> Verdict:
        rubric = self.rubric
        read = [object_in(each.text, "scores") for each in answers]
        scored = [scores_in(each, rubric.criteria, rubric.scale) for each in read]
        scores = {name: statistics.fmean(each[name] for each in scored) for name in rubric.criteria}
        total = rubric.total(scores)
        return Verdict(
            scores=scores,
            total=total,
            shares={name: rubric.normalise(score) for name, score in scores.items()},
            normalised=rubric.normalise(total),
            reason=words_in(read[0], "reason"),
            prompt_tokens=sum(each.prompt_tokens for each in answers),
            completion_tokens=sum(each.completion_tokens for each in answers),
        )


async def _all(asked: Sequence[Any]) -> list[Answer]:
    """All answers; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in asked]
    except* JudgeError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


_TOTAL = "total"


class LLMJudge:
    """Scores a response by criteria; the endpoint defaults to OPENAI_BASE_URL. `rules` are arguments of a Judge."""

    def __init__(
        self,
        model: str,
        criteria: Mapping[str, str] | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        **rules: Any,
    ) -> None:
        """Raises ValueError for invalid arguments or without an endpoint."""
        url = base_url or os.environ.get("OPENAI_BASE_URL")
        if not url:
            raise ValueError("base_url: name the endpoint that judges, here or in OPENAI_BASE_URL")
        named = dict(criteria or DEFAULT_CRITERIA)
        if _TOTAL in named:
            raise ValueError("no criterion may be called total: that is the mean of all")
        key = api_key or os.environ.get("OPENAI_API_KEY")
        self.judge = Judge(base_url=url, model=model, api_key=key, criteria=named, **rules)

    def evaluate(self, user_input: str, agent_response: str) -> dict[str, float]:
        """The score of each criterion, and the weighted mean as `total`. Raises JudgeFailed, JudgeAway."""
        return _by_name(self.judge.score(_reply(user_input, agent_response)))

    async def evaluate_async(self, user_input: str, agent_response: str) -> dict[str, float]:
        """As `evaluate`, async. Use it in one event loop only."""
        return _by_name(await self.judge.score_async(_reply(user_input, agent_response)))

    def close(self) -> None:
        self.judge.close()

    async def close_async(self) -> None:
        await self.judge.close_async()


def _reply(user_input: str, agent_response: str) -> Reply:
    return Reply(text=agent_response, messages=({"role": "user", "content": user_input},))


def _by_name(verdict: Verdict) -> dict[str, float]:
    return {**verdict.scores, _TOTAL: verdict.total}
