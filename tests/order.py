"""Which groups of tests begin first: those that take longest, or the last of them would run alone.

A group is what shares an engine, or a file. The seconds are rough, of two cores; who is not named takes fewer than any.
"""

from pathlib import Path

SECONDS = {
    "engine": 550,
    "test_loop": 240,
    "ray": 220,
    "test_architectures": 220,
    "two-engines": 150,
    "workers": 150,
    "clients": 130,
    "test_adapters": 110,
    "test_full_disk": 105,
    "test_rolling_upgrade": 120,
    "test_compose": 45,
    "test_monitoring": 40,
    "test_main": 100,
    "test_kills": 90,
    "test_shapes": 75,
    "test_generated": 70,
    "test_outage": 80,
    "test_clocks": 80,
    "test_batches": 75,
    "test_backup_under_load": 70,
    "test_chat": 60,
    "test_backup": 50,
    "test_held_out": 45,
    "test_like_vllm": 45,
    "test_older_ledger": 45,
    "test_canary": 45,
    "test_working_folder": 45,
    "test_outcomes": 40,
    "test_missing_database": 40,
    "test_canary_outage": 40,
    "test_engine_supervisor": 35,
    "test_trial": 35,
    "test_routes": 30,
    "test_grammars": 30,
    "test_vllm_plugin": 30,
    "test_secrets": 30,
    "test_reload": 30,
    "test_failures": 30,
    "test_fresh_engines": 30,
    "test_bad_requests": 30,
    "test_stored_completions": 30,
}


def seconds_of(group: str) -> int:
    """About how long a group takes."""
    return SECONDS.get(Path(group).stem, 0)
