"""Tokens with which a browser gives feedback on one reply: signed, short-lived, worthless for anything else.

    fb-<base64url of the claims>.<base64url of HMAC-SHA256 over them>

Of a token the ledger has how often it was used: the claims say which key made it, and it lives no longer than that key.

A fine-tuning job asks its own service by a token that begins with JOB_PREFIX, as one of its tenant.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import NamedTuple, TypeVar

import msgspec

PREFIX, JOB_PREFIX = "fb-", "ftjob-token-"

#: The longest life, in seconds, and the most events.
MAX_LIFE_S, MAX_EVENTS = 86400.0, 100

_NONCE_BYTES = 12

_Claims = TypeVar("_Claims", bound=msgspec.Struct)

#: A token is a few hundred characters; a longer one is not looked at.
_LONGEST = 4096


class FeedbackBinding(NamedTuple):
    """What the bearer of a token may say: of one reply, in one name, so many events, until a time (since 1970).

    `key_id` is that of its maker, empty where none was needed.
    """

    msg_id: str
    source: str
    expires_at: float
    max_events: int
    nonce: str
    key_id: str = ""


class TokenClaims(msgspec.Struct, frozen=True):
    """What a token says: who made it, of which reply, in whose name, until when (seconds since 1970), how often.

    `key_id` is empty where whoever made it needed no key; for `explorer.admin_key` it is `FeedbackTokens.admin_key_id`.
    """

    key_id: str
    tenant: str
    msg_id: str
    source: str
    expires_at: float
    max_events: int
    nonce: str = ""

    @property
    def binding(self) -> FeedbackBinding:
        """What it binds its bearer to. Where it names no source, the reply does: a browser is never its key's owner."""
        source = self.source or f"browser/{self.msg_id.partition(':')[0]}"
        return FeedbackBinding(self.msg_id, source, self.expires_at, self.max_events, self.nonce, self.key_id)


class JobClaims(msgspec.Struct, frozen=True):
    """What the token of a fine-tuning job says: which job of which tenant, the policy that answers it, until when.

    Policy 0 is the default one.
    """

    job: str
    tenant: str
    policy: int
    expires_at: float


class FeedbackTokens:
    """Signs and reads tokens under a secret of the installation."""

    def __init__(self, secret: bytes) -> None:
        # The secret signs the names of replies, too: what is signed for one must say nothing to the other.
        self._key = hashlib.blake2b(key=secret, person=b"feedback-token", digest_size=32).digest()

    def sign(self, claims: TokenClaims) -> str:
        """A new token."""
        made = msgspec.structs.replace(claims, nonce=secrets.token_hex(_NONCE_BYTES))
        payload = _text(msgspec.msgpack.encode(made))
        return f"{PREFIX}{payload}.{_text(self._mac(payload))}"

    def read(self, token: str) -> TokenClaims | None:
        """What a token of ours says; None for any other text."""
        return self._read(token, PREFIX, TokenClaims)

    def sign_job(self, claims: JobClaims) -> str:
        """A token with which a job asks its own service."""
        payload = _text(msgspec.msgpack.encode(claims))
        return f"{JOB_PREFIX}{payload}.{_text(self._mac(JOB_PREFIX + payload))}"

    def read_job(self, token: str) -> JobClaims | None:
        """What such a token says; None for any other text."""
        return self._read(token, JOB_PREFIX, JobClaims)

    def _read(self, token: str, prefix: str, kind: type[_Claims]) -> _Claims | None:
        payload, _, mac = token.removeprefix(prefix).partition(".")
        if len(token) > _LONGEST or not token.isascii():
            return None
        signed = payload if prefix == PREFIX else prefix + payload
        if not hmac.compare_digest(mac, _text(self._mac(signed))):
            return None
        try:
            data = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
            return msgspec.msgpack.decode(data, type=kind)
        except (binascii.Error, msgspec.MsgspecError):
            return None

    def admin_key_id(self, digest: bytes) -> str:
        """What stands for the id of `explorer.admin_key`, of this digest, in tokens; it tells nothing of the key."""
        return f"admin_{self._mac(f'admin key {digest.hex()}').hex()[:16]}"

    def _mac(self, payload: str) -> bytes:
        return hmac.digest(self._key, payload.encode(), "sha256")


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
