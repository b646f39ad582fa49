"""Where the service and its engines can be reached: the explorer's own port, and nothing else, from outside."""

import os
from pathlib import Path

import pytest

from tests.loop.harness.services import Service, descendants, in_several_processes, make_model, write_settings

pytestmark = pytest.mark.vllm

#: In /proc/net/tcp, the state of a socket that listens; in /proc/net/udp, of one that is bound and not connected.
_STATES = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}

#: As the kernel writes them: 127.0.0.1, ::1 and ::ffff:127.0.0.1.
_LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def listening(pids: list[int]) -> set[tuple[str, str, int]]:
    """Protocol, address and port of every socket of the processes that others could send to."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(descriptor))
            except FileNotFoundError:
                continue
    found = set()
    for protocol, state in _STATES.items():
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == state and f"socket:[{fields[9]}]" in sockets:
                found.add((protocol, address, int(port, 16)))
    return found


def test_only_the_explorers_own_port_is_open_to_other_machines(tmp_path: Path) -> None:
    config = in_several_processes(write_settings(tmp_path, make_model(tmp_path / "model")))
    config.write_text(
        config.read_text().replace("listen_address: 127.0.0.1", "listen_address: 0.0.0.0\n  insecure: true")
    )
    service = Service(config, "explorer")
    try:
        service.wait_until_ready()
        family = [service.process.pid, *descendants(service.process.pid)]
        found = listening(family)
        assert len(family) > 4  # control process, worker, guard, engine, and the engine's own
        assert (port := service.settings.explorer.proxy_port) in {each[2] for each in found}
        assert {each for each in found if not each[1].startswith(_LOOPBACK)} == {("tcp", "00000000", port)}
    finally:
        service.stop()
