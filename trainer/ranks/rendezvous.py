"""How the ranks of one machine find each other: by a file that their launcher names in the environment."""

from pathlib import Path

#: The file. Rank and number of ranks have the names that torchrun gives them.
RENDEZVOUS_VARIABLE = "TUNELOOP_RENDEZVOUS"


def environment_of(rank: int, size: int, rendezvous: Path) -> dict[str, str]:
    """The environment of one rank, beside that of its launcher. They talk on loopback alone."""
    return {
        RENDEZVOUS_VARIABLE: str(rendezvous),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
