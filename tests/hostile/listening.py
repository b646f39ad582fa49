"""Where processes can be reached: the sockets that they listen on."""

import os
from pathlib import Path

#: In /proc/net/tcp, the state of a socket that listens; in /proc/net/udp, of one that is bound and not connected.
_STATES = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}

#: As the kernel writes them: 127.0.0.1, ::1 and ::ffff:127.0.0.1.
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")

#: Every address of the machine.
ANYWHERE = "00000000"


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
