"""Prefix affinity: the engine that answered a conversation before still has its beginning in the prefix cache.

A prefix hash is a hash of a conversation up to some point. Each request is recorded under the hash of all its messages,
and the next one of its conversation finds it there. Where several workers answer, the last one may have come to
another. So what no worker remembers goes where all of them would send it, by the hash of the conversation's beginning:
rendezvous hashing, with a bound on how much busier that engine may be.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import orjson

#: How many requests are recorded; the least recently used are dropped first. All together take some megabytes.
MAX_ENTRIES = 8192

#: A prompt of a text completion has no turns: it is cut into blocks of so many characters, or token ids.
_BLOCK_CHARACTERS, _BLOCK_TOKENS = 1024, 256


class CachingEngine(Protocol):
    number: int
    loads: int


class PrefixAffinity:
    def __init__(self) -> None:
        #: By prefix hash: the engines' numbers, and how often their weights had changed by then.
        self._engines: OrderedDict[int, dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def record(self, prefix_hashes: Sequence[int], engine: CachingEngine) -> None:
        last = prefix_hashes[-1]
        self._engines.setdefault(last, {})[engine.number] = engine.loads
        self._engines.move_to_end(last)
        if len(self._engines) > MAX_ENTRIES:
            self._engines.popitem(last=False)

    def engines_with_prefix(self, prefix_hashes: Sequence[int], engines: Sequence[CachingEngine]) -> list[set[int]]:
        """The numbers of the engines that have a prefix cached, those with the longest prefix first."""
        found = []
        for prefix_hash in reversed(prefix_hashes):
            loads = self._engines.get(prefix_hash)
            if loads and (cached := {each.number for each in engines if loads.get(each.number) == each.loads}):
                found.append(cached)
        return found


def rendezvous(prefix_hashes: Sequence[int], engines: Sequence[CachingEngine]) -> list[int]:
    """The numbers of the engines, in the order in which every worker prefers them for a conversation."""
    # Python's hash of numbers is the same in every process.
    ranked = sorted((hash((*prefix_hashes[:1], each.number)), each.number) for each in engines)
    return [number for _, number in ranked]


def hash_prefixes(body: Mapping[str, Any]) -> tuple[int, ...]:
    """The hashes of prefixes; the first is the conversation's in every process, the last is of all of it."""
    messages = body.get("messages")
    if isinstance(messages, list):
        # One before each reply: only there a request of this conversation can have ended, so that a system prompt
        # alone, which many conversations share, draws no request to an engine.
        found, prefix_hash = [], 0
        for message in messages:
            if isinstance(message, dict) and message.get("role") == "assistant":
                found.append(prefix_hash)
            prefix_hash = _extend(prefix_hash, orjson.dumps(message))
        return (*found, prefix_hash)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return _of_blocks(prompt, _BLOCK_CHARACTERS)
    if isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
        return _of_blocks(tuple(prompt), _BLOCK_TOKENS)
    return ()


def _of_blocks(prompt: str | tuple[int, ...], size: int) -> tuple[int, ...]:
    found, prefix_hash = [], 0
    for end in range(size, len(prompt) + 1, size):
        prefix_hash = _extend(prefix_hash, repr(prompt[end - size : end]).encode())
        found.append(prefix_hash)
    return tuple(found)


def _extend(prefix_hash: int, piece: bytes) -> int:
    return int.from_bytes(blake2b(piece, digest_size=8, salt=prefix_hash.to_bytes(8)).digest())
