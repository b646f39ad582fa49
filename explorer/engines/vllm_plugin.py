"""A plugin for vLLM, loaded into each process of an engine: it packs log-probabilities (`packing/`).

The log-probability of a sampled token is a number; vLLM makes some twenty objects of it.

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

#: The environment variables that turn this on: computing with the parameters themselves, packing log-probabilities.
UNPACKED = "TUNELOOP_ENGINE_UNPACKED"
PACKS = "TUNELOOP_ENGINE_PACKS"


def register() -> None:
    """Called by vLLM, in every process of every engine that runs where tuneloop is installed."""
    if os.environ.get(UNPACKED) == "1":
        # The CPU builds of vLLM 0.26 to 0.33 compute with a packed copy of the weights. They drop, or leave behind, the
        # parameters that it came from: what is computed with cannot be summed, and a reload renews one of tied weights.
        layers = importlib.import_module("vllm.model_executor.layers.utils")
        linear = importlib.import_module("torch.nn.functional").linear

        def compute_with_parameters(layer: Any, remove_weight: bool) -> None:
            layer.cpu_linear = linear

        layers.dispatch_cpu_unquantized_gemm = compute_with_parameters  # type: ignore[attr-defined]
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


def serve(arguments: Sequence[str]) -> None:
    importlib.import_module("vllm.entrypoints.serve.utils.api_utils").cli_env_setup()
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    command = importlib.import_module("vllm.entrypoints.cli.serve").ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    parsed = parser.parse_args(["serve", *arguments])
    command.validate(parsed)
    command.cmd(parsed)


if __name__ == "__main__":
    serve(sys.argv[1:])
