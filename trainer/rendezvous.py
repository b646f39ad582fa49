"""How the ranks find each other: by a file, or between machines a port, that the environment names."""

from pathlib import Path

#: The URL of the file or port. Rank and number of ranks have the names that torchrun gives them.
RENDEZVOUS_VARIABLE = "TUNELOOP_RENDEZVOUS"


def environment_of(rank: int, size: int, rendezvous: Path) -> dict[str, str]:
    """The environment of one rank of this machine, beside that of its launcher. They talk on loopback alone."""
    return {
        RENDEZVOUS_VARIABLE: f"file://{rendezvous}",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
