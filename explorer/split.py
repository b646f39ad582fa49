"""How requests are divided while a version is being tried: who gets its replies, and of whose requests it gets copies.

Every worker decides by itself and all decide alike: by a hash, so that who has a key meets the same version every time.
"""

import hashlib

import msgspec

_WHOLE = 2**64


class Split(msgspec.Struct, frozen=True):
    """What a version that is being tried gets: the share of the keys it answers, and of those it gets copies of."""

    version: int
    share: float = 0.0
    copies: float = 0.0

    def answers(self, key: str) -> bool:
        """Whether it answers the requests of a key."""
        return place(self.version, key) < self.share

    def copied(self, key: str) -> bool:
        """Whether it gets copies of the requests of a key."""
        return place(self.version, key) < self.copies

    def withdrawn(self) -> "Split":
        """The same version without any requests."""
        return Split(self.version)


def place(version: int, key: str) -> float:
    """Where in [0, 1) a key lies. Each version has an order of its own, so that not the same users try them all."""
    return _place(b"%d" % version, key)


def _place(salt: bytes, key: str) -> float:
    digest = hashlib.blake2b(b"%b:%b" % (salt, key.encode("utf-8", "surrogatepass")), digest_size=8).digest()
    return int.from_bytes(digest) / _WHOLE


def held_out(key: str, share: float) -> bool:
    """Whether the replies to a key are held out of training, where so much of the traffic is.

    What is held out by a share is by a larger one too.
    """
    return _place(b"held out", key) < share


def split_of(mode: str, version: int, share: float) -> Split:
    """The split of a rollout in that mode."""
    return Split(version, copies=share) if mode == "shadow" else Split(version, share=share)
