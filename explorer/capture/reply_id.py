"""The names of replies, minted by us and signed: a guess, a typo or another tenant's id is refused without a look-up.

    chatcmpl-<40 characters>      every choice of a reply
    chatcmpl-<40 characters>:<k>  its choice k

Replies of other endpoints have their own prefix, as OpenAI's and Anthropic's have. The 40 characters are base32
(sortable by time) of: 6 bytes of milliseconds since 1970, 9 random bytes, the number of choices, and 9 bytes of
keyed BLAKE2b over these, the tenant, and a prefix that is not `chatcmpl-`. 255 choices or more are counted in the
place of the last 3 random bytes, and their own byte is 255.
"""

import hashlib
import hmac
import os
import re
import time
from typing import NamedTuple

PREFIX = "chatcmpl-"
PREFIXES = (PREFIX, "cmpl-", "resp_", "msg_")
MAX_CHOICES = (1 << 24) - 1

_MAC_BYTES = 9
_SIGNED, _BYTES = 40, 25
_MANY = 255
_MANY_BYTES = 3
_CHOICE_DIGITS = len(str(MAX_CHOICES))
_DIGITS = "0123456789abcdefghijklmnopqrstuv"
_SHIFTS = range(5 * (_SIGNED - 2), -1, -10)
_TWO_DIGITS = [high + low for high in _DIGITS for low in _DIGITS]
_WELL_FORMED = re.compile(f"[0-9a-v]{{{_SIGNED}}}").fullmatch


class ParsedReplyId(NamedTuple):
    """A msg_id that is ours, and the choice it names; None means all."""

    msg_id: str
    choice: int | None


class ReplyIdSigner:
    """Mints and recognises msg_ids under one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def mint(self, tenant: str, choices: int, prefix: str = PREFIX) -> str:
        """A new msg_id for a reply of `choices` choices (1 to MAX_CHOICES); `prefix` is one of PREFIXES."""
        if choices < _MANY:
            counted = os.urandom(9) + bytes([choices])
        else:
            counted = os.urandom(9 - _MANY_BYTES) + choices.to_bytes(_MANY_BYTES) + bytes([_MANY])
        name = (time.time_ns() // 1_000_000).to_bytes(6) + counted
        number = int.from_bytes(name + self._mac(name, tenant, prefix))
        # What base64.b32hexencode makes of 25 bytes, in half its time.
        return prefix + "".join([_TWO_DIGITS[number >> shift & 1023] for shift in _SHIFTS])

    def parse(self, text: str, tenant: str) -> ParsedReplyId | None:
        """What `text` names, or None if we never minted it for this tenant."""
        msg_id, colon, choice = text.partition(":")
        prefix = next((each for each in PREFIXES if msg_id.startswith(each)), "")
        signed = msg_id[len(prefix) :].lower()
        prefix = prefix or PREFIX
        if not _WELL_FORMED(signed):
            return None
        data = int(signed, 32).to_bytes(_BYTES)  # tens of times faster than b32hexdecode, whose digits these are
        name, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(name, tenant, prefix)):
            return None
        msg_id = prefix + signed
        if not colon:
            return ParsedReplyId(msg_id, None)
        if not (choice.isascii() and choice.isdigit() and len(choice) <= _CHOICE_DIGITS):
            return None
        if int(choice) >= (int.from_bytes(name[-1 - _MANY_BYTES : -1]) if name[-1] == _MANY else name[-1]):
            return None
        return ParsedReplyId(msg_id, int(choice))

    def _mac(self, name: bytes, tenant: str, prefix: str) -> bytes:
        whose = f"{tenant}\0{prefix}" if prefix != PREFIX else tenant
        # A MAC as HMAC is one, at a fifth of its price.
        return hashlib.blake2b(name + whose.encode(), key=self._key, digest_size=_MAC_BYTES).digest()


def minted_at(msg_id: str) -> float:
    """When a msg_id was minted that is ours, in seconds since 1970."""
    return (int(msg_id[-_SIGNED:], 32) >> 8 * (_BYTES - 6)) / 1000
