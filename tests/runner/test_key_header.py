"""A key that no header can carry is refused where it is given, and quoted nowhere."""

from collections.abc import Callable
from typing import Any

import pytest

from tuneloop.runner import AsyncFeedback, Feedback, HumanPreferenceCollector, Judge, VersionsClient
from tuneloop.runner.logs.request_logs import read_stored_completions

URL = "http://127.0.0.1:9"

CALLERS: list[Callable[[str], Any]] = [
    lambda key: Feedback(URL, api_key=key),
    lambda key: AsyncFeedback(URL, api_key=key),
    lambda key: HumanPreferenceCollector(URL, api_key=key),
    lambda key: VersionsClient(URL, key),
    lambda key: Judge(base_url=f"{URL}/v1", model="m", api_key=key),
    lambda key: next(read_stored_completions(URL, api_key=key)),
]


@pytest.mark.parametrize("key", ["secret\n", "secret ", "se\x00cret", "sécret"])
@pytest.mark.parametrize("caller", CALLERS, ids=range(len(CALLERS)))
def test_a_key_that_no_header_carries_is_refused_and_not_quoted(caller: Callable[[str], Any], key: str) -> None:
    with pytest.raises(ValueError, match="_key must be a text of visible ASCII characters") as refused:
        caller(key)
    assert "cret" not in str(refused.value)
