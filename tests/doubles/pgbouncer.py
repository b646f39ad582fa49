"""A PgBouncer before a PostgreSQL server of the tests, reached by a Unix socket only."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import make_url

from tests.hostile.fronts import environment, program_of
from tests.trainer.factories import eventually

_PORT = 6432


@contextmanager
def pooled(url: str, mode: str) -> Iterator[str]:
    """The URL of the server at `url` by way of a pooler with three of its sessions, in this mode."""
    program, server = program_of("pgbouncer"), make_url(url)
    there = Path(str(server.query["host"]))
    user = there.owner()
    folder = Path(tempfile.mkdtemp(prefix="tl-pool-", dir="/tmp"))
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n{server.database} = host={there} user={server.username}\n[pgbouncer]\n"
        f"pool_mode = {mode}\ndefault_pool_size = 3\nauth_type = any\nlisten_port = {_PORT}\n"
        f"unix_socket_dir = {folder}\nlogfile = {folder}/log\nmax_client_conn = 200\n"
    )
    for each in (folder, folder / "pgbouncer.ini"):
        shutil.chown(each, user)
    # Root must not run it.
    as_user = user if os.geteuid() == 0 else None
    process = subprocess.Popen([program, "-q", str(folder / "pgbouncer.ini")], user=as_user, env=environment())
    try:
        eventually(lambda: (folder / f".s.PGSQL.{_PORT}").exists())
        yield f"postgresql://{server.username}@/{server.database}?host={folder}&port={_PORT}"
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder)
