"""Names the environment variables by which ranks find each other: a file, or a port between machines."""

from pathlib import Path

#: The URL of the file or port. Rank and number of ranks use torchrun's names.
RENDEZVOUS_VARIABLE = "TUNELOOP_RENDEZVOUS"


def environment_of(rank: int, size: int, rendezvous: Path) -> dict[str, str]:
    """The environment of one local rank, beside the launcher's. Ranks use loopback only."""
    return {
        RENDEZVOUS_VARIABLE: f"file://{rendezvous}",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
