"""What runs now: the trainer's curves and steps, the doctor's report, and word of what changes."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from tuneloop.explorer.ui.overview import LedgerCounts
from tuneloop.explorer.ui.reading.curves import CurveReader
from tuneloop.explorer.ui.sessions import PATH
from tuneloop.explorer.ui.site import Site
from tuneloop.shared.errors import LedgerError, RequestRefused
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.operations.doctor import as_sections, examine_experiment

#: The folder of the trainer's run, below TensorBoard's.
RUN = "trainer"

#: Steps in the list.
STEPS = 30

#: The curves that matter first, what each says, and those that say the same of other methods.
FIRST = {
    ("critic/rewards/mean", "rewards/accuracies"): "What replies earned, step by step: it should rise.",
    ("evaluation/score",): "The share of the held-out tasks that are answered right: it should rise.",
    ("actor/kl_loss", "actor/kl_base", "kl"): "How far the model is from where it began: a jump is a warning.",
    ("actor/entropy",): "How undecided the model is: near 0 it says the same over and over.",
    ("response_length/mean",): "Tokens of a reply: if it only grows, the reward may pay for length alone.",
    ("mismatch_kl/mean",): "How far engine and trainer differ about what was sampled: it should stay near 0.",
    ("actor/pg_loss", "actor/dpo_loss", "actor/kto_loss", "actor/sft_loss"): "What each step lowers on its own batch.",
}
MOST = 6

#: How often it is looked for what has changed, for how long a browser is told before it asks again, and how many are.
_LOOK_S, _STREAM_S, _MAX_LISTENERS = 2.0, 300.0, 32


def add_operations(router: APIRouter, site: Site, counts: LedgerCounts) -> None:
    curves = CurveReader(site.settings.tensorboard_dir / RUN)
    examining = asyncio.Lock()

    @router.get("/trainer")
    async def trainer(request: Request) -> Response:
        shows_all = request.query_params.get("curves") == "all"
        context = await site.in_thread(request, lambda: _trainer(site.ledger, curves, shows_all=shows_all))
        return site.show(request, "trainer.html", **context, here=f"{PATH}/trainer{'?curves=all' * shows_all}")

    @router.get("/trainer/status")
    async def status(request: Request) -> Response:
        site.guard.admit(request)
        return site.show(request, "_trainer.html", facts=await counts.get())

    @router.get("/doctor")
    async def doctor(request: Request) -> Response:
        site.guard.admit(request)
        return site.show(request, "doctor.html")

    @router.get("/doctor/report")
    async def report(request: Request) -> Response:
        site.guard.admit(request)
        async with examining:  # it looks at every row
            found = await asyncio.to_thread(examine_experiment, site.settings)
        return site.show(request, "_doctor.html", report=found, sections=as_sections(found, site.settings))


def add_changes(router: APIRouter, site: Site) -> None:
    watch = ChangeWatch(site.ledger)

    @router.get("/events")
    async def events(request: Request) -> Response:
        site.guard.admit(request)
        if watch.listeners >= _MAX_LISTENERS:
            raise RequestRefused("too many pages listen to this worker already", status=503, code="too_many")
        stopping: asyncio.Event = request.app.state.stopping
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(watch.changes(stopping), media_type="text/event-stream", headers=headers)


class ChangeWatch:
    """Tells browsers that the ledger has changed, not what: they ask for that."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._marks: Sequence[int] = ()
        self._looked_at = 0.0
        self.listeners = 0

    async def changes(self, stopping: asyncio.Event) -> AsyncIterator[bytes]:
        """Server-sent events, until the service stops or it is time to ask again."""
        self.listeners += 1
        try:
            yield b"retry: 3000\n\n"
            known, until = await self._look(), time.monotonic() + _STREAM_S
            while time.monotonic() < until and not stopping.is_set():
                try:
                    await asyncio.wait_for(stopping.wait(), _LOOK_S)
                except TimeoutError:
                    marks = await self._look()
                    yield b"event: changed\ndata: \n\n" if marks != known else b": nothing new\n\n"
                    known = marks
        finally:
            self.listeners -= 1

    async def _look(self) -> Sequence[int]:
        """The ledger's marks, looked at once for all who listen."""
        if time.monotonic() - self._looked_at >= _LOOK_S / 2:
            self._looked_at = time.monotonic()
            try:
                self._marks = await asyncio.to_thread(self._ledger.reward_history.marks)
            except LedgerError:  # it is away: the page says so to whoever asks
                self._marks = ()
        return self._marks


def _trainer(ledger: Ledger, curves: CurveReader, *, shows_all: bool) -> dict[str, Any]:
    found = {name: curve for name, curve in curves.read().items() if curve}
    said = {
        next(name for name in names if name in found): sentence
        for names, sentence in FIRST.items()
        if not found.keys().isdisjoint(names)
    }
    first = dict([*said.items()][:MOST])
    shown = [*first, *(name for name in found if name not in first)] if shows_all or not first else [*first]
    versions = [each for each in ledger.versions.all() if each.version][::-1]
    charts = [
        (
            name,
            said.get(name, ""),
            {"kind": "line", "x": "step", "y": name, "data": [list(each) for each in zip(*found[name], strict=True)]},
        )
        for name in shown
    ]
    return {
        "charts": charts,
        "all_curves": len(found),
        "steps": versions[:STEPS],
        "more": max(0, len(versions) - STEPS),
    }
