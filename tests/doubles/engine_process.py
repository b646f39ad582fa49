"""The engine double as a process, which can be killed: `python -m tests.doubles.engine_process PORT`."""

import sys

import uvicorn

from tests.doubles.engine import EngineDouble
from tests.doubles.serving import Resettable

if __name__ == "__main__":
    uvicorn.run(
        # A pause between the pieces, so that a kill finds replies half sent.
        EngineDouble(answers_probes_by_manifest=True, piece_pause_s=0.002),
        port=int(sys.argv[1]),
        log_level="error",
        http=Resettable,
    )
