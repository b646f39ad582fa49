"""Which groups of tests begin first: those that take longest, or the last of them would run alone.

A group is what shares an engine, or a file. The seconds are rough, of two cores; who is not named takes fewer than any.
"""

from pathlib import Path

SECONDS = {
    "engine": 300,
    "clients": 100,
    "test_kills": 90,
    "test_loop": 120,
    "test_trinity_files": 80,
    "ray": 80,
    "test_distill": 60,
    "test_adapters": 60,
    "test_full_disk": 50,
    "test_outage": 40,
    "test_import": 20,
    "test_export": 20,
    "test_learning": 20,
    "test_races": 20,
    "test_stored_completions": 20,
}


def seconds_of(group: str) -> int:
    """About how long a group takes."""
    return SECONDS.get(Path(group).stem, 0)
