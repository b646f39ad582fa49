"""The bytes of an experience in SQL: its token ids and log-probabilities, raw.

    u32 P | u32 C | P prompt ids (int32) | C completion ids (int32) | C log-probabilities (float32)

All little-endian. Eight bytes more than the numbers themselves, and readable in any language.
"""

import struct

import numpy as np

from shared.experience import Experience, Float32s, Int32s

_HEADER = struct.Struct("<II")


def to_blob(experience: Experience) -> bytes:
    """The experience's numbers as one blob. Raises ValueError unless there is one log-probability per completion id."""
    prompt, completion, logprobs = experience.prompt_ids, experience.completion_ids, experience.logprobs
    if len(completion) != len(logprobs) or len(prompt) % 4 or len(completion) % 4:
        raise ValueError(f"{len(prompt)}+{len(completion)} bytes of ids, {len(logprobs)} of log-probabilities")
    return _HEADER.pack(len(prompt) // 4, len(completion) // 4) + prompt + completion + logprobs


def from_blob(blob: bytes) -> tuple[Int32s, Int32s, Float32s]:
    """Prompt ids, completion ids and log-probabilities of a blob. Raises ValueError when its length is wrong."""
    if len(blob) < _HEADER.size:
        raise ValueError(f"a blob has {len(blob)} bytes, fewer than its header")
    prompt, completion = _HEADER.unpack_from(blob)
    if len(blob) != _HEADER.size + 4 * (prompt + 2 * completion):
        raise ValueError(f"a blob of {prompt}+{completion} tokens has {len(blob)} bytes")
    ids = np.frombuffer(blob, dtype="<i4", count=prompt + completion, offset=_HEADER.size)
    logprobs = np.frombuffer(blob, dtype="<f4", offset=_HEADER.size + 4 * (prompt + completion))
    return ids[:prompt], ids[prompt:], logprobs
