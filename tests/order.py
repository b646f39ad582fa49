"""Which groups of tests begin first: those that take longest, or the last of them would run alone; which are slow.

A group is what shares an engine, or a file. The seconds are rough, of two cores; who is not named takes fewer than any.
Slow are the files and functions of slow.txt, which `make test` leaves to `make slow`. `--durations=0` tells both.
"""

from functools import cache
from pathlib import Path

SLOW = Path(__file__).with_name("slow.txt")

SECONDS = {
    "engine": 550,
    "test_loop": 260,
    "ray": 420,
    "test_architectures": 100,
    "two-engines": 90,
    "workers": 110,
    "clients": 100,
    "test_adapters": 110,
    "test_full_disk": 40,
    "test_rolling_upgrade": 120,
    "test_compose": 45,
    "test_monitoring": 40,
    "test_main": 100,
    "test_killed_service": 75,
    "test_kills": 75,
    "test_shapes": 75,
    "test_generated": 80,
    "test_outage": 50,
    "test_clocks": 70,
    "test_batches": 20,
    "test_backup_under_load": 50,
    "test_chat": 45,
    "test_backup": 25,
    "test_like_vllm": 25,
    "test_older_ledger": 45,
    "test_canary": 45,
    "test_working_folder": 45,
    "test_outcomes": 40,
    "test_missing_database": 25,
    "test_agentscope": 40,
    "test_client_objects": 35,
    "test_debug": 35,
    "test_recomputation": 35,
    "test_browser": 35,
    "test_left_files": 20,
    "test_resume": 30,
    "test_tuned": 25,
    "test_canary_outage": 40,
    "test_engine_supervisor": 35,
    "test_trial": 35,
    "test_routes": 30,
    "test_grammars": 30,
    "test_packed": 30,
    "test_packed_logprobs": 60,
    "test_secrets": 30,
    "test_reload": 30,
    "test_failures": 30,
    "test_fresh_engines": 30,
    "test_bad_requests": 30,
    "test_stored_completions": 30,
}


@cache
def slow_names() -> frozenset[str]:
    """The files, and the functions of others, whose tests are slow."""
    return frozenset(SLOW.read_text().split())


def is_slow(nodeid: str) -> bool:
    """Whether a test, with its parameters, is slow."""
    function = nodeid.partition("[")[0]
    return function in slow_names() or function.partition("::")[0] in slow_names()


def seconds_of(group: str) -> int:
    """About how long a group takes."""
    return SECONDS.get(Path(group).stem, 0)
