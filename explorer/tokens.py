"""Signed tokens: with one a browser gives feedback on one reply, with another a fine-tuning job asks its own service.

    <prefix><base64url of the claims>.<base64url of HMAC-SHA256 over what stands before>

A token for feedback is short-lived, and worthless for anything else. The claims say which key made it, and it lives no
longer than that key; the ledger has how often it was used.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import ClassVar, TypeVar

import msgspec

#: The longest life of a token for feedback, in seconds, and the most events.
MAX_LIFE_S, MAX_EVENTS = 86400.0, 100

#: A token is a few hundred characters; a longer one is not looked at.
_LONGEST = 4096


class FeedbackClaims(msgspec.Struct, frozen=True):
    """Who made a token, of which reply, in whose name, until when. `key_id` is empty where no key was needed."""

    prefix: ClassVar[str] = "fb-"

    key_id: str
    tenant: str
    msg_id: str
    source: str
    expires_at: float
    max_events: int
    nonce: str = msgspec.field(default_factory=lambda: secrets.token_hex(12))


class JobClaims(msgspec.Struct, frozen=True):
    """Which job of which tenant asks, the policy that answers it (0: the default one), until when."""

    prefix: ClassVar[str] = "ftjob-token-"

    job: str
    tenant: str
    policy: int
    expires_at: float


_Claims = TypeVar("_Claims", FeedbackClaims, JobClaims)


class TokenSigner:
    """Signs and reads tokens under a secret of the installation."""

    def __init__(self, secret: bytes) -> None:
        # The secret signs the names of replies, too: what is signed for one must say nothing to the other.
        self._key = hashlib.blake2b(key=secret, person=b"feedback-token", digest_size=32).digest()

    def sign(self, claims: FeedbackClaims | JobClaims) -> str:
        signed = claims.prefix + _text(msgspec.msgpack.encode(claims))
        return f"{signed}.{_text(self._mac(signed))}"

    def read(self, token: str, kind: type[_Claims]) -> _Claims | None:
        """What a token of ours of that kind says; None for any other text."""
        signed, _, mac = token.partition(".")
        if len(token) > _LONGEST or not token.isascii() or not token.startswith(kind.prefix):
            return None
        if not hmac.compare_digest(mac, _text(self._mac(signed))):
            return None
        try:
            payload = signed.removeprefix(kind.prefix)
            data = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
            return msgspec.msgpack.decode(data, type=kind)
        except (binascii.Error, msgspec.MsgspecError):
            return None

    def admin_key_id(self, digest: bytes) -> str:
        """What stands for the id of `explorer.admin_key`, of this digest, in tokens; it reveals nothing of the key."""
        return f"admin_{self._mac(f'admin key {digest.hex()}').hex()[:16]}"

    def _mac(self, payload: str) -> bytes:
        return hmac.digest(self._key, payload.encode(), "sha256")


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
