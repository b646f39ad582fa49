"""What runs now: the doctor's report, the trainer's steps, and its curves as it writes them for TensorBoard."""

import asyncio
import math
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from tuneloop.explorer.ui.overview import LedgerCounts
from tuneloop.explorer.ui.sessions import PATH
from tuneloop.explorer.ui.site import Site
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

#: Points of a curve that are kept, and those that are drawn.
MAX_KEPT, MAX_DRAWN = 20_000, 400

#: Bytes that are read at once: what is written more is read when one looks again.
_MAX_BYTES = 8 << 20

_LONGEST_RECORD = 1 << 20

Curve = list[tuple[int, float]]


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


class CurveReader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._read_to: dict[Path, int] = {}
        self._curves: dict[str, dict[int, float]] = {}

    def read(self) -> dict[str, Curve]:
        with self._lock:
            try:
                files = sorted(self._folder.glob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime_ns)
            except OSError:  # a file was deleted just now
                files = []
            for file in files:
                self._read_on(file)
            return {name: thin(sorted(points.items())) for name, points in sorted(self._curves.items())}

    def _read_on(self, path: Path) -> None:
        begin = self._read_to.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(begin)
                data = file.read(_MAX_BYTES)
        except OSError:  # deleted just now, or not ours to read: its curves are missing
            return
        for event, end in _records(data):
            step, values, restarted = _event(event)
            if restarted:  # an earlier run's points from here on are drawn no more
                for points in self._curves.values():
                    for late in [each for each in points if each >= step]:
                        del points[late]
            for name, value in values:
                points = self._curves.setdefault(name, {})
                points[step] = value
                if len(points) > MAX_KEPT:
                    del points[next(iter(points))]
            self._read_to[path] = begin + end


def thin(curve: Curve) -> Curve:
    """The curve with so few points as are drawn: what is not finite is left out, the last is kept."""
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    every = max(1, math.ceil(len(finite) / MAX_DRAWN))
    return finite[::-1][::every][::-1]


def _records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """The whole records, each with where it ends: a length in eight bytes, four of checksum, the event, four more."""
    at = 0
    while len(data) - at >= 16:
        length = struct.unpack_from("<Q", data, at)[0]
        if length > _LONGEST_RECORD or len(data) - at < 16 + length:
            return
        yield data[at + 12 : at + 12 + length], at + 16 + length
        at += 16 + length


def _event(event: bytes) -> tuple[int, list[tuple[str, float]], bool]:
    """The step, the scalars, and whether a run begins again at this step."""
    step, values, restarted = 0, [], False
    for field, value in _fields(event):
        if field == 2 and isinstance(value, int):
            step = value
        elif field == 5 and isinstance(value, bytes):
            for scalar in (dict(_fields(each)) for _, each in _fields(value) if isinstance(each, bytes)):
                name, number = scalar.get(1), scalar.get(2)
                if isinstance(name, bytes) and isinstance(number, float):
                    values.append((name.decode(errors="replace"), number))
        elif field == 7:
            restarted = True
    return step, values, restarted


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """The fields of a protobuf message, as far as it can be read."""
    at = 0
    try:
        while at < len(data):
            tag, at = _varint(data, at)
            match tag & 7:
                case 0:
                    value, at = _varint(data, at)
                    yield tag >> 3, value
                case 1:
                    yield tag >> 3, struct.unpack_from("<d", data, at)[0]
                    at += 8
                case 2:
                    length, at = _varint(data, at)
                    yield tag >> 3, data[at : at + length]
                    at += length
                case 5:
                    yield tag >> 3, struct.unpack_from("<f", data, at)[0]
                    at += 4
                case _:
                    return
    except (IndexError, struct.error):  # it is damaged: what could be read was
        return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


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
