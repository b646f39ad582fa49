"""Whether an engine that loads weights in place computes with them, tried out on the weights that it has already."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import structlog

from tuneloop.explorer.engines.vllm import EngineControl
from tuneloop.shared.checkpoints.manifest import VerifiedProbe
from tuneloop.shared.errors import CheckpointRejected, EngineError

log = structlog.get_logger()

#: How far an engine may be from itself afterwards, in nats on average. The same weights give the same numbers; where an
#: engine's numbers differ from one request to the next anyway, as many times what they do.
_SAME, _TIMES = 1e-3, 4.0


class ServedWeights(NamedTuple):
    """What an engine was started with. `head_is_seen`: a head of its own that outlived a reload would show.

    `fingerprints` are the files', by the dtype that engines serve; empty where they have none.
    """

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
        """Why engines cannot take up versions in place, None if they can; and whether this engine was tried now.

        One that was tried and failed must be started anew before it answers anybody. No engine may have requests.
        """
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
