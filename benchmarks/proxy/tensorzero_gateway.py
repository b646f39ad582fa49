"""Runs the gateway that the wheel of tensorzero carries, for the proxies' benchmark; in an environment with that wheel.

    python tensorzero_gateway.py CONFIG ADDRESS [POSTGRES_URL]

It listens on a port of its own choice, and says in the file ADDRESS which.
"""

import asyncio
import os
import sys
from pathlib import Path

from tensorzero import _start_http_gateway


async def serve(config: str, address: Path, postgres_url: str | None = None) -> None:
    """Serve until the process is ended."""
    os.environ["TENSORZERO_DISABLE_PSEUDONYMOUS_USAGE_ANALYTICS"] = "1"
    gateway = await _start_http_gateway(
        config_file=config, clickhouse_url=None, postgres_url=postgres_url, valkey_url=None, async_setup=True
    )
    address.write_text(gateway.base_url)  # noqa: ASYNC240
    await asyncio.Event().wait()


asyncio.run(serve(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
