"""Runs the proxy of trinity-rft 0.6.0 as it is shipped: its app, its service and its recorder, in front of one engine.

    python -m benchmarks.proxy.trinity FOLDER UPSTREAM PORT DATABASE_URL

FOLDER is filled as `peer_recorder.py` says. What its service asks of the rest of Trinity is stood in for: two classes
that it names in type hints, an explorer with the settings, and an engine that has an address and the version 0.
"""

import asyncio
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

from benchmarks.ledger.peer_recorder import open_folder

_TIMEOUT_S = 3600.0


class _Engine:
    """What the service uses of Trinity's own wrapper around an engine."""

    model_version = 0
    request_count = 0

    def __init__(self, address: str) -> None:
        self.api_address = address

    @property
    async def model_version_async(self) -> int:
        return self.model_version


def _stand_in(name: str, **members: object) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


def _explorer(upstream: str, database: str) -> SimpleNamespace:
    settings = SimpleNamespace(
        explorer=SimpleNamespace(
            min_running_model_num=1, service_status_check_interval=60, max_timeout=_TIMEOUT_S, db_url=database
        ),
        model=SimpleNamespace(temperature=1.0),
        synchronizer=SimpleNamespace(sync_timeout=_TIMEOUT_S),
    )
    return SimpleNamespace(models=[_Engine(upstream)], config=settings, explore_step_num=0)


async def main(folder: str, upstream: str, port: str, database: str) -> None:
    """Serve until the process is ended."""
    open_folder(Path(folder))
    _stand_in("trinity.common.models")
    _stand_in("trinity.common.models.model", ModelWrapper=_Engine)
    _stand_in("trinity.explorer.explorer", Explorer=SimpleNamespace)
    service = import_module("trinity.explorer.proxy.service").ExplorerService(
        _explorer(upstream, database), "127.0.0.1", int(port)
    )
    await service.serve()
    await service.serve_task


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
