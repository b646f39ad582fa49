"""SIGKILL of every process at random moments under load; prints what came of it, of which the verdict must be nothing.

.venv/bin/python -m benchmarks.chaos [--kills 200] [--exchanges 10000] [--database postgres] [--policies]
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.loop.harness.kills import run


def main() -> int:
    """Run it; 0 if nothing was lost and nothing happened twice."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="go on until there were so many kills,")
    parser.add_argument("--exchanges", type=int, default=10_000, help="and so many replies read to their end")
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--policies", action="store_true", help="train a second policy beside the default one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to leave everything to be looked at; must be empty")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        report = run(
            options.folder or Path(temporary),
            kills=options.kills,
            exchanges=options.exchanges,
            postgres=options.database == "postgres",
            policies=options.policies,
            seed=options.seed,
        )
    print(json.dumps(asdict(report) | {"seconds": round(time.monotonic() - started)}, indent=2))
    return 0 if report.verdict.spotless else 1


if __name__ == "__main__":
    sys.exit(main())
