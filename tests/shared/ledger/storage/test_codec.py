import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import exchange, experience, feedback
from tuneloop.shared.experience import decode, encode, pack_ids, pack_logprobs
from tuneloop.shared.ledger.storage.codec import from_blob, pack_text, to_blob, unpack_text

ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50)
pairs = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(width=32)), max_size=50)


@given(prompt=ids, completion=pairs)
def test_what_goes_in_comes_out(prompt: list[int], completion: list[tuple[int, float]]) -> None:
    said = experience(
        prompt_ids=pack_ids(prompt),
        completion_ids=pack_ids([id_ for id_, _ in completion]),
        logprobs=pack_logprobs([logprob for _, logprob in completion]),
    )
    prompt_ids, completion_ids, logprobs = from_blob(to_blob(said))
    assert prompt_ids.tolist() == prompt
    assert completion_ids.tolist() == [id_ for id_, _ in completion]
    np.testing.assert_array_equal(logprobs, np.float32([logprob for _, logprob in completion]))


def test_the_bytes_are_the_documented_ones() -> None:
    said = experience(prompt_ids=pack_ids([1]), completion_ids=pack_ids([2]), logprobs=pack_logprobs([-1.0]))
    assert to_blob(said).hex(" ", 4) == "01000000 01000000 01000000 02000000 000080bf"


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": b""},
        {"logprobs": pack_logprobs([-1.0])},
        {"logprobs": pack_logprobs([-1.0] * 3)},
        {"prompt_ids": b"123"},
        {"completion_ids": b"12345", "logprobs": b"12345"},
    ],
)
def test_numbers_that_do_not_fit_together_raise(wrong: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match="bytes of ids"):
        to_blob(experience(**wrong))


@given(blob=st.binary(max_size=100))
def test_any_bytes_are_a_blob_or_a_value_error(blob: bytes) -> None:
    try:
        _prompt, completion, logprobs = from_blob(blob)
    except ValueError:
        return
    assert len(completion) == len(logprobs)


def test_a_blob_whose_header_was_damaged_is_a_value_error() -> None:
    blob = to_blob(experience(prompt_ids=pack_ids([7] * 1000)))
    assert len(blob) < 1000
    for damaged in (b"\xff" * 8 + blob[8:], blob[:-1], blob[:20]):
        with pytest.raises(ValueError, match="blob"):
            from_blob(damaged)


@given(text=st.one_of(st.binary(max_size=200), st.just(b"\x28\xb5\x2f\xfd")))
def test_a_text_goes_in_and_comes_out(text: bytes) -> None:
    assert unpack_text(pack_text(text)) == text


def test_a_record_of_the_outbox_comes_back_as_it_was() -> None:
    for record in (exchange(task_id="task", run_id="run"), feedback(choice=3)):
        assert decode(encode(record)) == record
