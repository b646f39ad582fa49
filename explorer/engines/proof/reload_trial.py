"""Whether an engine computes with the weights that it loads, and samples from the policy, tried out on requests.

Engines may be started by others, with any arguments, and a release of vLLM may do what an argument says otherwise than
it should: its CPU build drafts tokens (speculative decoding) and accepts them at a temperature that it reads from
uninitialised memory (0.32; vllm-project/vllm#55005).
"""

import asyncio
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import structlog

from tuneloop.explorer.engines.vllm import NEUTRAL_SAMPLING, EngineControl
from tuneloop.shared.checkpoints import VerifiedProbe
from tuneloop.shared.errors import CheckpointRejected, EngineError

log = structlog.get_logger()

#: How far an engine may be from itself afterwards, in nats on average. The same weights give the same numbers; where an
#: engine's numbers differ from one request to the next anyway, as many times what they do.
_SAME, _TIMES = 1e-3, 4.0


class ServedWeights(NamedTuple):
    """What an engine was started with. `head_is_seen`: a head of its own that outlived a reload would show."""

    actor: Path
    fingerprints: Mapping[str, Mapping[str, int]]
    head_is_seen: bool


class ReloadTrial:
    """The trial of one explorer: the first engine that is up is tried, and the others wait for what comes of it."""

    def __init__(self) -> None:
        self._trying = asyncio.Lock()
        self._fault: str | None = None
        self._over = False

    async def fault(self, control: EngineControl, weights: ServedWeights) -> tuple[str | None, bool]:
        """Why engines cannot load versions in place, if not; and whether this one was tried now."""
        async with self._trying:
            tries = not self._over
            if tries:
                self._fault = await reload_fault(control, weights)
                self._over = True
        return self._fault, tries


async def reload_fault(control: EngineControl, weights: ServedWeights) -> str | None:
    """What is wrong with an engine after it has loaded its own weights in place; None if nothing is."""
    try:
        before = await control.create_probe()
        noise = (await control.measure_probe(before)).weights
    except (EngineError, CheckpointRejected) as error:  # such as an engine without a tokenizer
        log.warning("reload_not_tried", reason=str(error))
        return None
    probe = VerifiedProbe.of(before, weights.fingerprints)
    try:
        await control.pause("keep")
        await control.load(weights.actor)
        await control.reset_prefix_cache()
        await control.resume()
        after = await control.measure_probe(probe)
    except (EngineError, CheckpointRejected) as error:
        return f"it cannot load weights in place: {error}"
    same = max(_SAME, _TIMES * noise)
    if after.parts:
        return f"after it has loaded its own weights in place, {after.problem}"
    if not after.weights <= same:
        return f"after it has loaded its own weights in place, it is {after.weights:.2g} nats from what it was"
    if not after.cache <= max(same, after.allowed):
        return after.problem
    if after.parts is None and not weights.head_is_seen:
        return "its head is tied to its embeddings, and nothing shows whether a CPU engine renews both"
    return None


#: A log-probability so near to 0 is that of the only token that could be sampled.
_CERTAIN_LOGPROB = 1e-3

#: Not 1, which would hide a temperature that is not heeded.
_TEMPERATURE = 0.5
_TOKENS = 32

#: Those who draft tokens by what was said before find something to draft.
_REPETITIVE = "one two three four five six seven eight nine ten " * 4

#: A difference of two log-probabilities may be twice as far off as one.
_OF_A_DIFFERENCE = 2.0

_PROCESSED = (
    "its log-probabilities are not those of the distribution that it samples from; start it with "
    "--logprobs-mode processed_logprobs"
)
_OTHERWISE = (
    "its log-probabilities at temperature {temperature:g} are {off:.2g} nats from the policy's, {allowed:.2g} are "
    "allowed: it samples otherwise than it is asked to; start it without speculative decoding"
)


async def require_samples_of_the_policy(control: EngineControl) -> None:
    """Raise EngineError unless the engine samples from the policy, with drafts too, as far as is seen."""
    try:
        # With `top_k` 1 there is one token to sample, with log-probability 0; by the raw logits there are others.
        choice = await _complete(control, prompt="a", max_tokens=1, temperature=1.0, top_k=1, logprobs=1)
        [logprob] = choice["logprobs"]["token_logprobs"]
        if not logprob > -_CERTAIN_LOGPROB:
            raise EngineError(_PROCESSED)
        if not await control.drafts_tokens():
            return
        off, allowed = await _distance_at_temperature(control), control.tolerance * _OF_A_DIFFERENCE
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"its log-probabilities cannot be read: {error!r}") from error
    if not off <= allowed:
        raise EngineError(_OTHERWISE.format(temperature=_TEMPERATURE, off=off, allowed=allowed))


async def _distance_at_temperature(control: EngineControl) -> float:
    """How far its log-probabilities at a temperature are from those of the model's logits at it, in nats on average.

    These are not returned. But of two tokens at one place log-probabilities differ as the logits do, and these as the
    log-probabilities at temperature 1, which are returned for a prompt.
    """
    text = await control.query("/tokenize", prompt=_REPETITIVE)
    half = text["max_model_len"] // 2
    asked = {"prompt": text["tokens"][:half], "max_tokens": min(_TOKENS, half - 1), "ignore_eos": True}
    reply = await _complete(
        control, **asked, **NEUTRAL_SAMPLING, temperature=_TEMPERATURE, logprobs=2, return_token_ids=True
    )
    ids = [*text["tokens"][:half], *reply["token_ids"]]
    again = await _complete(control, prompt=ids, max_tokens=1, temperature=1.0, prompt_logprobs=2)
    as_sampled = [
        {token.removeprefix("token_id:"): logprob for token, logprob in each.items()}
        for each in reply["logprobs"]["top_logprobs"]
    ]
    of_model = [
        {token: each["logprob"] for token, each in alternatives.items()}
        for alternatives in again["prompt_logprobs"][-len(as_sampled) :]
    ]
    return fmean(
        abs(_TEMPERATURE * (told[one] - told[other]) - (model[one] - model[other]))
        for told, model in zip(as_sampled, of_model, strict=True)
        for one, other in pairwise(sorted(told.keys() & model.keys()))
    )


async def _complete(control: EngineControl, **fields: object) -> dict[str, Any]:
    answer = await control.query("/v1/completions", **fields, return_tokens_as_token_ids=True)
    choice: dict[str, Any] = answer["choices"][0]
    return choice
