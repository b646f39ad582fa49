"""What durable experiences cost on this machine, ours and the peer's side by side, on SQLite and PostgreSQL.

    .venv/bin/python -m benchmarks.ledger [--peer FOLDER] [--database postgresql://…] [--parts recording claims bytes …]

(a) recording: experiences acknowledged and in the database per second, and the latency of the acknowledgement, with as
    many lanes as `--lanes`, each as fast as it can, and again with `--paced` exchanges a second in all.
    Ratios are ours to the peer's: of rates the median over the rounds, of latencies that of all together;
(b) claims: the trainer's claim of a batch with few and with many committed rows waiting;
(c) bytes: what an exchange with one experience takes, of values and on disk;
(d) growth: what the page, the gauges, doctor and purge ask, with few and with many exchanges;
(e) scaling: several processes on one PostgreSQL database, against one, for replies and for feedback about others.

peer_recorder.py says how to fill the peer's FOLDER. Without `--database` a PostgreSQL server of its own is
started, with its fsync on. All files lie in /tmp, so that both databases and the outbox have one disk to share.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.databases import Databases, PostgresDatabases, SqliteFiles
from benchmarks.ledger import claims, growth, recording, scaling, sizes
from benchmarks.ledger.load import Plan
from benchmarks.ledger.peer_recorder import open_folder
from tests.doubles import postgres

PARTS = ("recording", "claims", "bytes", "growth", "scaling")


def main() -> int:
    """Measure the chosen parts, print the tables, then all of it as JSON."""
    options = _options()
    if options.peer is not None:
        open_folder(options.peer)
    report: dict[str, Any] = {"syncs_per_s": recording.syncs_per_s()}
    print(f"disk: {report['syncs_per_s']:.0f} fdatasyncs of 8 KiB per second, one after the other")
    for part in options.parts:
        report[part] = []
        for kind in options.kinds if part != "scaling" else ("postgresql",):
            with _databases(kind, options.database) as databases:
                report[part] += asyncio.run(_measure(part, databases, options))
        print(f"\n{part}\n{_table(report[part])}", flush=True)
    print(json.dumps(json.loads(json.dumps(report), parse_float=lambda number: float(f"{float(number):.4g}"))))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger", description=__doc__)
    parser.add_argument("--peer", type=Path, metavar="FOLDER", help="where trinity-rft lies; without it, ours alone")
    parser.add_argument("--database", help="a PostgreSQL server whose user may create databases")
    parser.add_argument("--kinds", nargs="+", choices=("sqlite", "postgresql"), default=("sqlite", "postgresql"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--completions", nargs="+", type=int, default=(64, 512), help="completion tokens")
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each round")
    parser.add_argument("--most", type=int, default=4000, help="exchanges in a round")
    parser.add_argument("--paced", type=float, default=50.0, help="exchanges offered per second, in the second load")
    parser.add_argument("--waiting", nargs="+", type=int, default=(1000, 10_000, 100_000, 1_000_000))
    parser.add_argument("--exchanges", nargs="+", type=int, default=(8_000, 1_000_000), help="of growth")
    parser.add_argument("--claims", type=int, default=9, help="claims at each depth")
    parser.add_argument("--processes", type=int, default=3, help="of the part scaling")
    parser.add_argument("--groups", type=int, default=20, help="of 64 records, for each process and round of scaling")
    return parser.parse_args()


async def _measure(part: str, databases: Databases, options: argparse.Namespace) -> list[dict[str, Any]]:
    if part == "claims":
        return claims.measure(databases, options.waiting, options.claims)
    if part == "growth":
        return growth.measure(databases, options.exchanges, options.rounds)
    if part == "scaling":
        return scaling.measure(databases, options.processes, options.rounds, options.groups)
    peer = options.peer is not None
    if part == "bytes":
        lines = [await sizes.measure(databases, tokens, peer=peer) for tokens in options.completions]
    else:
        chosen = {name: getattr(options, name) for name in ("lanes", "rounds", "seconds", "most", "paced")}
        lines = [
            await recording.measure(databases, tokens, Plan(**chosen), peer=peer) for tokens in options.completions
        ]
    return [line for group in lines for line in group]


@contextmanager
def _databases(kind: str, url: str | None) -> Iterator[Databases]:
    if kind == "sqlite":
        with tempfile.TemporaryDirectory(prefix="tl-sqlite-", dir="/tmp") as folder:
            yield SqliteFiles(Path(folder))
    elif url is not None:
        yield PostgresDatabases(url)
    else:
        server = postgres.started(durable=True)
        try:
            yield PostgresDatabases(server.url)
        finally:
            server.close()


def _table(lines: Sequence[Mapping[str, Any]]) -> str:
    titles = list(dict.fromkeys(title for line in lines for title in line))
    cells = [titles, *([_cell(line.get(title)) for title in titles] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in cells)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return "-" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
