"""What stands before the service: nothing, nginx, or HAProxy, each keeping one connection to it for all users.

`scripts/install-clients` puts them, and PgBouncer, below .venv/clients/fronts where they are not installed.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest

from tests.explorer.running import eventually
from tests.hostile.echo import listens
from tests.loop.harness.services import free_port

Front = Literal["direct", "nginx", "haproxy"]

_UNPACKED = Path(__file__).parents[2] / ".venv" / "clients" / "fronts"

_SHIPPED = Path(__file__).parents[2] / "deploy" / "proxy"

#: What tells the service that a request was forwarded.
_FORWARDED = (
    "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;",
    "proxy_set_header X-Forwarded-Proto $scheme;",
    "http-request set-header X-Forwarded-For %[src]",
)

_NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 512; }}
http {{
  access_log off; client_body_temp_path {folder}/bodies; proxy_temp_path {folder}/proxied;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  {shipped}
}}
"""


def settings_of(kind: Front, *, explorer: str, port: int, folder: Path, forwards: bool) -> str:
    """The shipped file for these addresses, with one kept connection. Unless it `forwards`, it says of no client's."""
    shipped = (_SHIPPED / ("nginx.conf" if kind == "nginx" else "haproxy.cfg")).read_text()
    changes = {
        "127.0.0.1:8010": explorer,
        "listen 80;": f"listen 127.0.0.1:{port};",
        "bind :80": f"bind 127.0.0.1:{port}",
        "keepalive 32;": "keepalive 1;",
        f"server one {explorer}": f"server one {explorer} pool-max-conn 1",
        "http-reuse safe": "http-reuse always",
        "timeout http-request 30s": "timeout http-request 5s",
        "_header_timeout 30s;": "_header_timeout 5s;",
        "_body_timeout 30s;": "_body_timeout 5s;",
    }
    if not forwards:
        changes |= dict.fromkeys(_FORWARDED, "")
    for before, now in changes.items():
        shipped = shipped.replace(before, now)
    return _NGINX.format(folder=folder, shipped=shipped) if kind == "nginx" else shipped


@contextmanager
def front_before(url: str, kind: Front, folder: Path, *, forwards: bool = False) -> Iterator[str]:
    """The URL at which users reach the service at `url`, behind the shipped files.

    Skips the test where the front is not to be had. Without keys the service answers nothing that a front forwards.
    """
    if kind == "direct":
        yield url
        return
    program = program_of(kind)
    port, settings = free_port(), folder / f"{kind}.conf"
    settings.write_text(settings_of(kind, explorer=urlsplit(url).netloc, port=port, folder=folder, forwards=forwards))
    arguments = ["-p", folder, "-e", folder / "errors", "-c", settings] if kind == "nginx" else ["-db", "-f", settings]
    with (folder / f"{kind}.log").open("wb") as log:
        running = subprocess.Popen([program, *map(str, arguments)], stdout=log, stderr=log, env=environment())
    try:
        eventually(lambda: listens(port) or running.poll() is not None)
        assert running.poll() is None, (folder / f"{kind}.log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        running.kill()
        running.wait()


def program_of(kind: str) -> str:
    places = (os.environ["PATH"], "/usr/sbin", _UNPACKED / "usr" / "sbin")
    found = shutil.which(kind, path=os.pathsep.join(map(str, places)))
    if found is None:
        pytest.skip(
            f"{kind} IS NOT INSTALLED, and scripts/install-clients could not get it: nothing is tested behind it"
        )
    return found


def environment() -> dict[str, str]:
    libraries = os.pathsep.join(str(each) for each in (_UNPACKED / "usr" / "lib").glob("*-linux-gnu"))
    return os.environ | ({"LD_LIBRARY_PATH": libraries} if libraries else {})
