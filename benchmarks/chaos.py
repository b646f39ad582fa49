"""SIGKILL of explorer and trainer at random moments under load; prints what was lost, which must be nothing.

.venv/bin/python -m benchmarks.chaos --kills 200 [--seed 0] [--database postgresql://…]
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.loop.kills import BATCH, run


def main() -> int:
    """Run it; 0 if nothing was lost and nothing was trained on twice."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", help="a database URL; without one, an SQLite file")
    options = parser.parse_args()
    experience_buffer = {"path": options.database} if options.database else {}
    buffer = {"train_batch_size": BATCH, "trainer_input": {"experience_buffer": experience_buffer}}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        report = run(Path(folder), kills=options.kills, seed=options.seed, buffer=buffer)
    print(json.dumps(asdict(report) | {"seconds": round(time.monotonic() - started)}, indent=2))
    lost = report.exchanges_lost + report.feedbacks_lost + report.rewards_wrong
    return 1 if lost or report.imbalance or report.steps_not_accounted_for else 0


if __name__ == "__main__":
    sys.exit(main())
