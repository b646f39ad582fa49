import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.sampling import Sampling, sampling_of
from shared.errors import RequestRefused


def off_policy(**asked: Any) -> str | None:
    return sampling_of(asked, default_temperature=1.0).off_policy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("bad_words", ["no"]),
        ("allowed_token_ids", [1, 2]),
        ("min_tokens", 3),
        ("use_beam_search", True),
        ("ignore_eos", True),
        ("structured_outputs", {"json": {}}),
        ("guided_json", {}),
        ("guided_regex", "a*"),
        ("guided_choice", ["a"]),
        ("guided_grammar", "x"),
        ("thinking_token_budget", 10),
        ("logits_processors", ["x"]),
        ("continue_final_message", True),
        ("vllm_xargs", {"a": 1}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", "json"),
        ("response_format", []),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("top_p", "0.9"),
    ],
)
def test_what_changes_the_distribution_is_named(name: str, value: object) -> None:
    assert off_policy(**{name: value}) == f"sampling:{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 1),
        ("top_p", 1.0),
        ("top_k", 0),
        ("top_k", -1),
        ("min_p", 0.0),
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("logit_bias", {}),
        ("logit_bias", None),
        ("bad_words", []),
        ("min_tokens", 0),
        ("use_beam_search", False),
        ("response_format", {"type": "text"}),
        ("response_format", None),
        ("tool_choice", "auto"),
        ("tool_choice", "none"),
        ("stop", ["x"]),
        ("max_tokens", 5),
        ("temperature", 0.7),
        ("n", 2),
    ],
)
def test_what_leaves_the_distribution_alone_is_not(name: str, value: object) -> None:
    assert off_policy(**{name: value}) is None


@pytest.mark.parametrize("asked", [0, 0.0, 1e-6, "0"])
def test_greedy_decoding_is_no_sample(asked: object) -> None:
    assert off_policy(temperature=asked) == "sampling:temperature=0"


@pytest.mark.parametrize(("asked", "kept"), [(0.7, 0.7), (1, 1.0), ("0.5", 0.5), (None, 0.9)])
def test_the_temperature_is_what_the_engine_makes_of_it(asked: object, kept: float) -> None:
    assert sampling_of({"temperature": asked}, default_temperature=0.9) == Sampling(kept, None)
    assert sampling_of({}, default_temperature=0.9).temperature == 0.9


@pytest.mark.parametrize("asked", [-1, "nan", "inf", "x", [], {}, math.inf])
def test_a_temperature_that_is_none_is_refused(asked: object) -> None:
    with pytest.raises(RequestRefused, match="temperature"):
        sampling_of({"temperature": asked}, default_temperature=1.0)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(
    st.dictionaries(st.sampled_from(["top_p", "response_format", "tool_choice", "logit_bias", "temperature"]), _json)
)
def test_any_request_is_read_or_refused(asked: dict[str, Any]) -> None:
    try:
        found = sampling_of(asked, default_temperature=1.0)
    except RequestRefused:
        return
    assert 0 <= found.temperature < math.inf
