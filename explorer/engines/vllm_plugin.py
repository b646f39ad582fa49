"""A plugin for vLLM, loaded into each process of an engine, which changes how CPU engines start, wait and compute.

vLLM's processes wait for each other in a loop of `sched_yield`. On Linux 6.18 such a loop beside a process that
computes keeps every other process of the machine waiting as long as both go on, for seconds at a time, unless there is
a core for each. vLLM has another way to wait, for Pythons before 3.11.1: to sleep for no time at all.

vLLM's CPU build copies weights into a packed form that it computes with, and drops, or leaves behind, the parameters
that they came from. Then nobody can look at what is computed with, and of tied weights a reload renews only one.

On a CPU vLLM starts its processes anew, where on a GPU it forks them; each then imports vLLM again, which takes fifteen
seconds of a core. What forking does not bear is threads that compute: engines on a CPU have one.

The log-probability of a sampled token is a number; vLLM makes some twenty objects of it (`packing/`).

`python -m` this file is `vllm serve`, which starts several API servers, where the module that is vLLM's for `python -m`
starts one. It is not found as `vllm` where that is installed under the name of its CPU build.
"""

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from tuneloop.explorer.engines.packing import core, front_end, gpu_scores, gpu_worker
from tuneloop.explorer.engines.packing.patching import UnknownVllm

log = logging.getLogger(__name__)

#: The environment variables that turn this on: sleeping, computing with the parameters themselves, forking, packing.
SLEEPS = "TUNELOOP_ENGINE_SLEEPS"
UNPACKED = "TUNELOOP_ENGINE_UNPACKED"
FORKS = "TUNELOOP_ENGINE_FORKS"
PACKS = "TUNELOOP_ENGINE_PACKS"


def register() -> None:
    """Called by vLLM, in every process of every engine that runs where tuneloop is installed."""
    if os.environ.get(SLEEPS) == "1":
        importlib.import_module("vllm.distributed.utils").USE_SCHED_YIELD = False  # type: ignore[attr-defined]
    if os.environ.get(UNPACKED) == "1":
        layers = importlib.import_module("vllm.model_executor.layers.utils")
        layers.dispatch_cpu_unquantized_gemm = _compute_with_parameters  # type: ignore[attr-defined]
    if os.environ.get(FORKS) == "1":
        _fork(importlib.import_module("vllm.utils.system_utils"))
    if os.environ.get(PACKS) == "1":
        # Change each part of the engine that is built as it is known: for packed log-probabilities. Only API
        # servers begin packing, and each part may do without the others.
        parts = [core, front_end]
        if importlib.import_module("vllm.triton_utils").HAS_TRITON:
            parts += [gpu_scores, gpu_worker]
        for part in parts:
            try:
                part.install()
            except UnknownVllm as error:
                log.warning("vLLM is left unchanged in %s: %s", part.__name__.rpartition(".")[2], error)


def _fork(processes: Any) -> None:
    """Have vLLM fork its processes unless it sees a reason not to, which that they compute on a CPU is not."""
    forced = processes._maybe_force_spawn

    def unless_forced() -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        forced()

    processes._maybe_force_spawn = unless_forced


def _compute_with_parameters(layer: Any, remove_weight: bool) -> None:
    """In place of vLLM's function of these parameters, which packs."""
    layer.cpu_linear = importlib.import_module("torch.nn.functional").linear


def serve(arguments: Sequence[str]) -> None:
    """What `vllm serve` does with these arguments."""
    importlib.import_module("vllm.entrypoints.serve.utils.api_utils").cli_env_setup()
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    command = importlib.import_module("vllm.entrypoints.cli.serve").ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    parsed = parser.parse_args(["serve", *arguments])
    command.validate(parsed)
    command.cmd(parsed)


if __name__ == "__main__":
    serve(sys.argv[1:])
