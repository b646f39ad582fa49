"""Starts the systems of the proxies' benchmark: ours and nginx here, the others in `others.py`."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from sqlalchemy import text

from benchmarks.databases import PostgresDatabases, connect
from benchmarks.proxy.load import running, wait_until_ready
from tests.doubles import postgres

MODEL = "tiny"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a system runs: its folder, its port, the upstream, and a new database of the server, if it wants one."""

    folder: Path
    #: What is installed once, for this and later runs.
    work: Path
    port: int
    upstream: str
    database: str | None = None


@dataclass(frozen=True, kw_only=True)
class System:
    """A proxy that is running."""

    name: str
    port: int
    pids: Sequence[int] = ()
    path: str = "/v1/chat/completions"
    model: str = MODEL
    #: How many exchanges it has recorded until now; None if it records nothing.
    recorded: Callable[[], int] | None = None
    #: Takes milliseconds of CPU for a request: it gets fewer streams.
    slow: bool = False


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A proxy that can be started."""

    name: str
    #: Installs it if need be, starts it, and stops it in the end.
    start: Callable[["Kind", Place], AbstractContextManager[System]]
    #: Whether it keeps its records in a database of the PostgreSQL server.
    postgres: bool = False
    #: Ours alone have more than one.
    workers: int = 1
    #: The checkout of ours that is measured.
    source: Path = Path(__file__).parents[2]
    options: dict[str, Any] = field(default_factory=dict)


@contextmanager
def nginx(kind: Kind, place: Place) -> Iterator[System]:
    """One worker, keep-alive to the upstream, buffering off, as for server-sent events."""
    config = place.folder / "nginx.conf"
    config.write_text(f"""
daemon off; worker_processes 1; pid {place.folder}/pid; error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 16m; client_body_buffer_size 256k; keepalive_requests 1000000000;
  client_body_temp_path {place.folder}/body; proxy_temp_path {place.folder}/proxy;
  fastcgi_temp_path {place.folder}/f; uwsgi_temp_path {place.folder}/u; scgi_temp_path {place.folder}/s;
  upstream engine {{ server {place.upstream.removeprefix("http://")}; keepalive 128; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{place.port};
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
""")
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    command = (program, "-p", place.folder, "-c", config, "-e", "stderr")
    with start_processes(command, place, "/health") as pid:
        yield System(name=kind.name, port=place.port, pids=(pid,))


@contextmanager
def tuneloop(kind: Kind, place: Place) -> Iterator[System]:
    """Ours, attached to the upstream, on its own database."""
    (place.folder / "model").mkdir()
    (place.folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    explorer: dict[str, Any] = {
        "listen_address": "127.0.0.1",
        "proxy_port": place.port,
        "outbox_max_bytes": 8 << 30,
        "rollout_model": {"engine_urls": [place.upstream], "dtype": "float32"},
    }
    if kind.workers > 1:
        explorer["workers"] = kind.workers
    settings = {
        "mode": "serve",
        "project": "benchmark",
        "name": "proxy",
        "checkpoint_root_dir": str(place.folder / "checkpoints"),
        "model": {"model_path": str(place.folder / "model"), "served_model_name": MODEL},
        "explorer": explorer,
    }
    database = f"sqlite:///{place.folder}/ledger.db"
    if place.database is not None:
        database = place.database
    settings["buffer"] = {"trainer_input": {"experience_buffer": {"path": database}}}
    config = place.folder / "tuneloop.yaml"
    config.write_text(yaml.safe_dump(settings))
    module, path = _explorer_of(kind.source, place.folder / "links")
    command = (sys.executable, "-m", module, "--config", config)
    with start_processes(command, place, "/health/ready", env={"PYTHONPATH": str(path)}, cwd=place.folder) as pid:
        recorded = rows(database, "exchanges" if place.database is None else "exp_buffer.exchanges")
        yield System(name=kind.name, port=place.port, pids=(pid,), recorded=recorded)


def _explorer_of(checkout: Path, links: Path) -> tuple[str, Path]:
    """The explorer's module in a checkout, and the folder to import it from: older ones have it at their top level."""
    script = checkout / "scripts" / "links"
    if not script.exists():
        return "explorer", checkout
    subprocess.run([script, links], check=True)
    return "tuneloop.explorer", links


class Server(PostgresDatabases):
    """A PostgreSQL server of our own, with its fsync on, as it comes."""

    def __init__(self, server: postgres.PostgresServer) -> None:
        super().__init__(server.url)
        first, *_ = (server.program.folder / "postmaster.pid").read_text().splitlines()
        self.pids = (int(first),)


@contextmanager
def postgres_server() -> Iterator[Server]:
    """A server, removed afterwards."""
    server = postgres.started(durable=True)
    try:
        yield Server(server)
    finally:
        server.close()


def rows(url: str, table: str) -> Callable[[], int]:
    """Counts the rows of a table, 0 while there is none."""

    def count() -> int:
        with connect(url) as connection:
            return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())

    return count


def start_processes(
    command: Sequence[str | Path],
    place: Place,
    ready: str,
    *,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> AbstractContextManager[int]:
    """The process of a system that answers at the path `ready`."""

    @contextmanager
    def start() -> Iterator[int]:
        log = place.folder / "log"
        with running(command, log, env=env, cwd=cwd) as pid:
            wait_until_ready(f"http://127.0.0.1:{place.port}{ready}", pid, log)
            yield pid

    return start()


def direct(kind: Kind, place: Place) -> AbstractContextManager[System]:
    """No proxy."""
    return nullcontext(System(name=kind.name, port=int(place.upstream.rpartition(":")[2])))
