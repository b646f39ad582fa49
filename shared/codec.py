"""The bytes of an experience in SQL: its token ids and log-probabilities, raw.

    u32 number of prompt ids | u32 number of completion ids | prompt ids (int32) | completion ids (int32) | logprobs (float32)

All little-endian. Eight bytes more than the numbers themselves, and readable in any language.
"""

import struct

import numpy as np

from shared.experience import Experience, Float32s, Int32s

_HEADER = struct.Struct("<II")


def to_blob(experience: Experience) -> bytes:
    """The experience's numbers as one blob."""
    prompt, completion, logprobs = experience.prompt_ids, experience.completion_ids, experience.logprobs
    assert len(completion) == len(logprobs), "one log-probability per completion id"
    return _HEADER.pack(len(prompt) // 4, len(completion) // 4) + prompt + completion + logprobs


def from_blob(blob: bytes) -> tuple[Int32s, Int32s, Float32s]:
    """Prompt ids, completion ids and log-probabilities of a blob. Raises ValueError when its length is wrong."""
    prompt, completion = _HEADER.unpack_from(blob)
    if len(blob) != _HEADER.size + 4 * (prompt + 2 * completion):
        raise ValueError(f"a blob of {prompt}+{completion} tokens has {len(blob)} bytes")
    ids = np.frombuffer(blob, dtype="<i4", count=prompt + completion, offset=_HEADER.size)
    logprobs = np.frombuffer(blob, dtype="<f4", offset=_HEADER.size + 4 * (prompt + completion))
    return ids[:prompt], ids[prompt:], logprobs
