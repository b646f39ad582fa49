"""What stands before the service: nothing, nginx, or HAProxy, each keeping one connection to it for all users.

`scripts/install-clients` puts the two below .venv/clients/fronts where they are not installed.
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

_NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 512; }}
http {{
  access_log off; client_max_body_size 0; client_header_timeout 5s; client_body_timeout 5s;
  client_body_temp_path {folder}/bodies; proxy_temp_path {folder}/proxied; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream explorer {{ server {explorer}; keepalive 1; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://explorer; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $host;
      proxy_buffering off; proxy_request_buffering off; proxy_next_upstream off; proxy_read_timeout 20s;
      {more}
    }}
  }}
}}
"""

_HAPROXY = """
global
  nbthread 1
defaults
  mode http
  retries 0
  http-reuse always
  timeout connect 5s
  timeout client 20s
  timeout server 20s
  timeout http-request 5s
frontend users
  bind 127.0.0.1:{port}
  default_backend explorer
backend explorer
  server one {explorer} pool-max-conn 1
"""


@contextmanager
def front_before(url: str, kind: Front, folder: Path, more: str = "") -> Iterator[str]:
    """The URL at which users reach the service at `url`. Skips the test where the front is not to be had.

    `more` are directives of nginx.
    """
    if kind == "direct":
        yield url
        return
    program = program_of(kind)
    port, settings = free_port(), folder / f"{kind}.conf"
    template = _NGINX if kind == "nginx" else _HAPROXY
    settings.write_text(template.format(folder=folder, port=port, explorer=urlsplit(url).netloc, more=more))
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


def program_of(kind: Front) -> str:
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
