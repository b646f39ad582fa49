"""An engine with our extension is found out for a single bit; one without is proven by log-probabilities only."""

import itertools
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.doubles.engine import EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.running import RunningExplorer, eventually
from tests.explorer.versions.test_attestation import mismatches, outcomes
from tests.explorer.versions.test_reload import actor, candidate, until, until_ready, version
from tuneloop.explorer.engines.fleet import EngineState
from tuneloop.shared.experience import VersionState
from tuneloop.shared.operations.doctor import as_text, examine_experiment
from tuneloop.shared.operations.engines import plugin_sentence

pytestmark = pytest.mark.contract


def gauge(explorer: RunningExplorer) -> float:
    return explorer.metrics()["tuneloop_engine_fingerprint"]


def served(running_explorer: Run, double: EngineDouble) -> RunningExplorer:
    """An explorer whose engine was proven to have version 1, and answers probes as if it had whatever it has."""
    explorer = running_explorer(double, probe_interval=0.2)
    double.weights = explorer.settings.model.model_path.absolute()
    double.answers_probes_by_manifest = True
    candidate(explorer)
    until(explorer, 1, VersionState.CHAMPION)
    until_ready(explorer, 1)
    seen = outcomes(explorer)["matched"]
    eventually(lambda: outcomes(explorer)["matched"] >= seen + 2)
    return explorer


def doctors_engines(explorer: RunningExplorer) -> list[str]:
    """What `tuneloop doctor` says of them."""
    address = explorer.settings.explorer.model_copy(update={"proxy_port": urlsplit(explorer.url).port})
    settings = explorer.settings.model_copy(update={"explorer": address})
    lines = [*as_text(examine_experiment(settings), settings)]
    first = next(number for number, line in enumerate(lines) if line.startswith("Engines"))
    rest = itertools.takewhile(lambda line: line.startswith(" "), lines[first + 1 :])
    return [line[10:].strip() for line in (lines[first], *rest)]


def one_unit_off(explorer: RunningExplorer, folder: Path) -> Path:
    """A copy of version 1, one element of which is the next number."""
    copy = folder / "elsewhere" / "global_step_1"
    shutil.copytree(actor(explorer, 1).parent, copy)
    weights = load_file(copy / "actor" / "model.safetensors")
    weights["model.norm.weight"].view(np.uint32)[2] += 1
    save_file(weights, copy / "actor" / "model.safetensors", metadata={"format": "pt"})
    return copy / "actor"


def give(double: EngineDouble, weights: Path) -> None:
    """Other weights, and a prefix cache of none."""
    double.weights = weights
    double.prefixes.clear()


def test_one_unit_in_one_element_is_found_within_one_probe(
    running_explorer: Run, double: EngineDouble, tmp_path: Path
) -> None:
    double.extended = double.packs = True
    explorer = served(running_explorer, double)
    assert gauge(explorer) == 1
    assert explorer.chat().headers["x-tuneloop-attested"] == "fingerprint"
    assert explorer.chat(stream=True).headers["x-tuneloop-attested"] == "fingerprint"
    told = "engine 0 ready, version 1, its weights proven by fingerprint, with our vLLM plugin"
    assert doctors_engines(explorer) == [told]
    give(double, one_unit_off(explorer, tmp_path))
    eventually(lambda: len(mismatches(explorer)) == 1 and double.weights == actor(explorer, 1))
    [figures] = mismatches(explorer)
    assert (figures["parts"], figures["weights"]) == (1, 0)
    [alarm] = explorer.ledger.alarms.all()
    assert "the engine's weights are not the version's: 1 parts differ, what is in no layer" in alarm.reason
    until_ready(explorer, 1)


def test_a_version_that_an_engine_did_not_load_to_the_bit_is_rejected(
    running_explorer: Run, double: EngineDouble, tmp_path: Path
) -> None:
    double.extended = True
    explorer = served(running_explorer, double)
    double.keeps_old_weights = True
    candidate(explorer)
    until(explorer, 2, VersionState.REJECTED)
    assert "the engine's weights are not the version's" in str(version(explorer, 2).reason)


def test_an_engine_without_the_extension_is_proven_by_log_probabilities_only(
    running_explorer: Run, double: EngineDouble, tmp_path: Path
) -> None:
    explorer = served(running_explorer, double)
    assert gauge(explorer) == 0
    assert explorer.chat().headers["x-tuneloop-attested"] == "log-probabilities only"
    told = "engine 0 ready, version 1, its weights proven by log-probabilities only, without our vLLM plugin"
    assert doctors_engines(explorer) == [told, plugin_sentence(of_others=True)]
    give(double, one_unit_off(explorer, tmp_path))
    seen = outcomes(explorer)["matched"]
    eventually(lambda: outcomes(explorer)["matched"] >= seen + 2)
    assert mismatches(explorer) == []
    assert explorer.services.fleet.engines[0].state is EngineState.READY
