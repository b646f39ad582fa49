"""Which groups of tests begin first: those that take longest, or the last of them would run alone.

A group is what shares an engine, or a file. The seconds are rough, of two cores; who is not named takes fewer than any.
"""

from pathlib import Path

SECONDS = {
    "engine": 650,
    "test_loop": 280,
    "ray": 270,
    "test_architectures": 270,
    "two-engines": 190,
    "clients": 175,
    "workers": 150,
    "test_main": 150,
    "test_adapters": 145,
    "test_outcomes": 145,
    "test_full_disk": 105,
    "test_chat": 105,
    "test_kills": 90,
    "test_outage": 80,
    "test_clocks": 80,
    "test_reload": 75,
    "test_batches": 75,
    "test_backup_under_load": 70,
    "test_failures": 65,
    "test_secrets": 60,
    "test_vllm_plugin": 60,
    "test_older_ledger": 55,
    "test_held_out": 55,
    "test_like_vllm": 55,
    "test_routes": 50,
    "test_backup": 50,
    "test_canary": 50,
    "test_trial": 50,
    "test_working_folder": 45,
    "test_engine_supervisor": 45,
    "test_grammars": 45,
    "test_fresh_engines": 40,
    "test_missing_database": 40,
    "test_pins": 40,
    "test_stored_completions": 40,
    "test_bad_requests": 40,
    "test_canary_outage": 40,
}


def seconds_of(group: str) -> int:
    """About how long a group takes."""
    return SECONDS.get(Path(group).stem, 0)
