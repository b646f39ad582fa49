"""A version that is registered on this machine is noticed at once."""

import asyncio
import time

from tuneloop.explorer.versions.reload import wait_for_registration
from tuneloop.shared.job_marks import note_registered, registration_stamp


def test_a_version_is_noticed_within_a_second_and_without_one_the_interval_is_waited_out(tmp_path):
    async def take() -> tuple[float, float]:
        seen, began = registration_stamp(tmp_path), time.monotonic()
        asyncio.get_running_loop().call_later(0.1, note_registered, tmp_path, 1, 1)
        await wait_for_registration(tmp_path, seen, at_most_s=60)
        noticed = time.monotonic()
        await wait_for_registration(tmp_path, registration_stamp(tmp_path), at_most_s=0.5)
        return noticed - began, time.monotonic() - noticed

    noticed_s, waited_s = asyncio.run(take())
    assert 0.1 <= noticed_s < 10
    assert waited_s >= 0.5
