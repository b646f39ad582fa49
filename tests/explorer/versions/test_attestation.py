"""Engines that do not have the weights they should have are found out by the next probe, and set right."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import factories
from tests.doubles.engine import EngineDouble
from tests.explorer.checkpoints import register
from tests.explorer.conftest import Run
from tests.explorer.running import RunningExplorer, eventually, open_ledger, settings_for
from tests.explorer.versions.test_reload import SWAP, actor, all_ready, candidate, model, until_ready
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.versions import loading
from tuneloop.explorer.versions.attestation import Attestation
from tuneloop.explorer.versions.loading import KnownProbes, Verifier, verify_in_process
from tuneloop.shared.checkpoints import Probe, VerifiedProbe
from tuneloop.shared.errors import LedgerUnavailable
from tuneloop.shared.experience import State, VersionAction
from tuneloop.shared.ledger.recording.attestation import Attestations, Distrusted, Mismatch

pytestmark = pytest.mark.contract

PROBE_S = 0.2
ANOTHER = "another process has, such as another explorer"


def outcomes(explorer: RunningExplorer) -> dict[str, float]:
    """How many probes there were, by what came of them."""
    found = explorer.http.get("/metrics").text.splitlines()
    counts = [line.rsplit(" ", 1) for line in found if line.startswith("tuneloop_engine_probes_total{")]
    return {name.split('"')[1]: float(count) for name, count in counts}


def last_good(explorer: RunningExplorer, engine: int) -> float:
    """When the last good probe of an engine began."""
    name = f'tuneloop_engine_last_good_probe_timestamp_seconds{{engine="{engine}"}} '
    [line] = [each for each in explorer.http.get("/metrics").text.splitlines() if each.startswith(name)]
    return float(line.removeprefix(name))


def served(running_explorer: Run, *doubles: EngineDouble, probe_interval: float = PROBE_S) -> RunningExplorer:
    """An explorer whose engines have version 1 and were found right."""
    explorer = all_ready(running_explorer, list(doubles), probe_interval=probe_interval)
    eventually(lambda: outcomes(explorer)["matched"] >= len(doubles))
    candidate(explorer)
    eventually(lambda: explorer.ledger.versions.champion().version == 1)
    engines = explorer.services.fleet.engines
    eventually(lambda: all(each.version == 1 and each.state is EngineState.READY for each in engines))
    now = time.time()
    eventually(lambda: outcomes(explorer)["matched"] >= 2 * len(doubles))
    if probe_interval == PROBE_S:
        eventually(lambda: all(last_good(explorer, each.number) > now for each in engines))
    return explorer


def said_by(explorer: RunningExplorer, engine: int) -> str:
    """A reply of an engine, waiting to be trained on."""
    [exchange] = factories.committed(explorer.ledger, engine=engine, received_at=time.time(), latency_s=0.1)
    return exchange.msg_id


def state_of(explorer: RunningExplorer, msg_id: str) -> tuple[str, str | None]:
    """State and reason of a reply's row."""
    [row] = explorer.rows(f"SELECT state, reason FROM experiences WHERE msg_id = '{msg_id}'")
    return row.state, row.reason


def mismatches(explorer: RunningExplorer) -> list[dict[str, Any]]:
    """The figures of the mismatches that were found."""
    return [each.details for each in explorer.ledger.versions.events() if each.action == VersionAction.MISMATCH]


def test_from_the_probe_to_the_row(running_explorer: Run, doubles: list[EngineDouble]) -> None:
    """Out of rotation, loaded anew, proven, alarmed; what that engine said is out of training, and only that."""
    explorer = served(running_explorer, *doubles, probe_interval=3600)
    wrong_ones, right_ones = said_by(explorer, 0), said_by(explorer, 1)
    heard = explorer.chat().json()["id"]
    for double in doubles:
        double.posts.clear()
    doubles[0].weights = model(explorer)  # a reload that nobody was told was skipped
    explorer.control.fleet.engines[0].swaps += 1

    eventually(lambda: explorer.ledger.alarms.all() != [] and doubles[0].weights == actor(explorer, 1))
    until_ready(explorer, 2)
    assert (doubles[0].posts, doubles[1].posts) == (SWAP, [])
    assert state_of(explorer, wrong_ones) == (State.DROPPED, "engine_mismatch")
    assert state_of(explorer, heard) == (State.DROPPED, "engine_mismatch")
    assert state_of(explorer, right_ones) == (State.COMMITTED, None)
    [alarm] = explorer.ledger.alarms.all()
    assert (alarm.name, alarm.version, alarm.holds) == ("engine_mismatch", 1, False)
    assert f"engine 0 of {explorer.settings.explorer_name} did not answer with the weights" in alarm.reason
    assert ANOTHER not in alarm.reason, "what was loaded last was ours"
    [figures] = mismatches(explorer)
    assert (figures["engine"], figures["trained"]) == (0, {})
    assert figures["dropped"] >= 1
    assert figures["weights"] > figures["allowed"]
    eventually(lambda: outcomes(explorer)["matched"] >= 5)
    assert outcomes(explorer)["mismatched"] == 1

    again = explorer.chat().json()["id"]
    assert state_of(explorer, again) == (State.RECORDED, None)
    assert explorer.version() == 1


def test_it_is_found_out_without_any_reload_too(running_explorer: Run, doubles: list[EngineDouble]) -> None:
    explorer = served(running_explorer, *doubles)
    doubles[1].weights = Path("/jobs/global_step_9/actor")
    eventually(lambda: doubles[1].weights == actor(explorer, 1))
    eventually(lambda: [each["engine"] for each in mismatches(explorer)] == [1])
    eventually(lambda: explorer.ledger.alarms.all() != [])
    assert ANOTHER in explorer.ledger.alarms.all()[0].reason, "nobody here has loaded those weights"


@pytest.mark.parametrize("cause", ["weights", "prefixes"])
def test_the_base_model_is_known_by_what_an_engine_said_of_it_at_first(
    running_explorer: Run, doubles: list[EngineDouble], cause: str
) -> None:
    explorer = all_ready(running_explorer, doubles, probe_interval=PROBE_S)
    eventually(lambda: outcomes(explorer)["matched"] >= 4)
    other = Path("/jobs/global_step_9/actor")
    if cause == "weights":
        doubles[1].weights = other
    else:
        doubles[1].prefixes = dict.fromkeys(doubles[1].prefixes, other)
    eventually(lambda: len(mismatches(explorer)) == 1)
    until_ready(explorer, 2)
    assert doubles[1].weights == model(explorer)
    [figures] = mismatches(explorer)
    assert (figures["engine"], explorer.ledger.alarms.all()[0].version) == (1, 0)
    assert figures["cache" if cause == "prefixes" else "weights"] > figures["allowed"]
    assert (ANOTHER in explorer.ledger.alarms.all()[0].reason) == (cause == "weights")


def test_an_engine_that_cannot_be_set_right_is_out_of_rotation(
    running_explorer: Run, doubles: list[EngineDouble]
) -> None:
    explorer = served(running_explorer, *doubles)
    doubles[0].keeps_old_weights = True
    doubles[0].weights = model(explorer)
    eventually(lambda: len(mismatches(explorer)) == 1)
    engine = explorer.services.fleet.engines[0]
    eventually(lambda: engine.state is EngineState.DOWN)
    # Its supervisor gives it the weights again and again, and does not attach to it.
    tries = doubles[0].posts.count("/collective_rpc")
    eventually(lambda: doubles[0].posts.count("/collective_rpc") >= tries + 2)
    assert engine.state is EngineState.DOWN
    explorer.chat()
    assert explorer.exchanges()[-1].engine == 1


def test_an_engine_that_is_away_is_no_mismatch(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.resets = True
    eventually(lambda: explorer.services.fleet.engines[0].state is EngineState.DOWN)
    double.resets = False
    until_ready(explorer, 1)
    assert explorer.ledger.alarms.all() == []


def test_a_prefix_cache_that_outlives_its_weights_fails_the_reload(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    double.keeps_prefixes = True
    candidate(explorer)
    eventually(lambda: explorer.ledger.versions.all()[1].reason is not None)
    assert "with and without its prefix cache" in str(explorer.ledger.versions.all()[1].reason)


def test_what_the_database_could_not_be_told_it_is_told_later(
    running_explorer: Run, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer = served(running_explorer, double)
    away, distrust = [True], Attestations.distrust

    def moody(self: Attestations, found: Mismatch) -> Distrusted:
        if away[0]:
            raise LedgerUnavailable("away")
        return distrust(self, found)

    monkeypatch.setattr(Attestations, "distrust", moody)
    double.weights = model(explorer)
    eventually(lambda: double.weights == actor(explorer, 1))
    until_ready(explorer, 1)
    assert mismatches(explorer) == []
    away[0] = False
    eventually(lambda: len(mismatches(explorer)) == 1)


class Overtaken:
    """An engine that was given another adapter while it was probed: it does not answer like the one before."""

    loads_in_place, renaming, proof = False, None, ""
    engine: Engine

    async def of(self, engine: Engine) -> tuple[None, None]:
        return None, None

    async def measure_probe(self, probe: None, *, base: bool = True) -> SimpleNamespace:
        self.engine.begin_load()
        self.engine.end_load(self.engine.version + 1)
        return SimpleNamespace(problem="other weights", weights=1.0, cache=0.0, allowed=0.1, parts=None)


def attesting(control: Overtaken, tmp_path: Path) -> tuple[Attestation, Engine]:
    engine = Engine(0, SimpleNamespace(renaming=None), control)  # type: ignore[arg-type]
    fleet, reloader = Fleet([engine], wait_timeout_s=1), SimpleNamespace(probes=control)
    attestation = Attestation(
        settings_for(tmp_path),
        fleet,
        ledger=None,  # type: ignore[arg-type]
        metrics=Metrics(),
        reloader=reloader,  # type: ignore[arg-type]
    )
    engine.state = EngineState.READY
    return attestation, engine


async def test_an_adapter_that_was_swapped_meanwhile_is_no_mismatch(tmp_path: Path) -> None:
    attestation, engine = attesting(control := Overtaken(), tmp_path)
    control.engine = engine
    await attestation.attest(engine)
    assert (engine.state, engine.loads) == (EngineState.READY, 0)
    assert attestation._due(engine)


class Known:
    """An engine that is asked for a probe of its own, and remembers by what it was proven."""

    def __init__(self, version: int) -> None:
        self.version, self.control = version, self
        self.described = 0
        self.proven_by: list[VerifiedProbe] = []

    async def create_probe(self) -> Probe:
        self.described += 1
        return Probe(prompt_ids=(1, 2), logprobs=(-1.0,), tolerance=0.0)

    async def prove(self, probe: VerifiedProbe) -> None:
        self.proven_by.append(probe)


async def test_what_is_served_is_proven_by_its_fingerprint_however_many_candidates_were_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_REMEMBERED", 3)
    monkeypatch.setattr(loading, "_FINGERPRINTS", {})
    ledger = open_ledger(settings := settings_for(tmp_path))
    verifier, probes = Verifier.of(settings), KnownProbes(ledger)
    base, served = Known(0), Known(1)
    for number in range(1, 5):
        register(ledger, settings.job_dir)
        version = ledger.versions.all()[number]
        await verify_in_process(version, verifier)
        await probes.of(base)  # type: ignore[arg-type]
        await probes.of(served)  # type: ignore[arg-type]
        await probes.prove(Known(number), version)  # type: ignore[arg-type]
    await probes.prove(served, ledger.versions.all()[1])  # type: ignore[arg-type]
    assert served.proven_by[-1].fingerprints
    assert base.described == 1
    assert len(probes._known) == 3
    ledger.close()
