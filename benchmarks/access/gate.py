"""Measures the cost of authentication per request: `python -m benchmarks.access.gate`."""

import statistics
import time
from typing import Any

from tuneloop.explorer.auth import Gatekeeper
from tuneloop.explorer.tokens import FeedbackClaims, TokenSigner
from tuneloop.shared.experience import Scope, steady_clock
from tuneloop.shared.ledger.keys import AccessKey, KeyLimits, KeyTable, digest_of
from tuneloop.shared.settings.settings import Settings

_KEYS, _ROUNDS, _CALLS = 1000, 15, 20_000
_LIMITS = KeyLimits(
    requests_per_minute=2**31 - 1,
    tokens_per_minute=2**31 - 1,
    feedback_per_minute=2**31 - 1,
    max_concurrent=2**31 - 1,
)


def _scope(path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    usual = [(b"host", b"localhost:8010"), (b"accept", b"*/*"), (b"user-agent", b"x"), (b"content-length", b"120")]
    return {"type": "http", "method": "POST", "path": path, "headers": [*usual, *headers]}


def _bearer(secret: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {secret}".encode()


def _microseconds(gate: Gatekeeper, make: Any) -> float:
    """The median over rounds of one request's time, without making its scope."""
    found = []
    for _ in range(_ROUNDS):
        scopes = [make() for _ in range(_CALLS)]
        began = time.perf_counter()
        for scope in scopes:
            gate.admit(scope)
        found.append(1e6 * (time.perf_counter() - began) / _CALLS)
    return statistics.median(found)


def main() -> None:
    """Print a line per way to authenticate."""
    settings = Settings.model_validate({"model": {"model_path": "some/model"}})
    tokens = TokenSigner(b"k" * 32)
    closed, opened = Gatekeeper(settings, tokens), Gatekeeper(settings, tokens)
    keys = tuple(
        AccessKey(
            key_id=f"key_{number}",
            digest=digest_of(f"tl-{number:043}"),
            name="web",
            tenant="acme",
            scopes=(Scope.FEEDBACK, Scope.INFERENCE),
            limits=_LIMITS,
        )
        for number in range(_KEYS)
    )
    closed.apply(KeyTable(keys, in_force=True, revision=1))
    secret, chat = f"tl-{7:043}", "/v1/chat/completions"
    claims = FeedbackClaims("key_7", "acme", "chatcmpl-x", "ann", steady_clock() + 86400, 100)
    token = tokens.sign(claims)
    for what, gate, make in (
        ("no key, on loopback", opened, lambda: _scope(chat)),
        ("a key of 1000, all limits", closed, lambda: _scope(chat, _bearer(secret))),
        ("the same in the path", closed, lambda: _scope(f"/key/{secret}{chat}")),
        ("a token for feedback", closed, lambda: _scope("/feedback", _bearer(token))),
    ):
        print(f"{what:28} {_microseconds(gate, make):6.2f} µs")


if __name__ == "__main__":
    main()
