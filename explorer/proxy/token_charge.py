"""What a request costs its key in tokens: what the engine told of it, or an estimate where it told nothing."""

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from tuneloop.explorer.capture.transcript import Transcript
from tuneloop.explorer.http.caller import Meter

#: Of text, for which an engine told no tokens.
BYTES_A_TOKEN = 4

#: How fast a reply is taken to be sampled of which the client did not wait to hear.
_TOKENS_PER_S = 50

_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class TokenCharge:
    """The tokens of one request, which are counted once, however it ends."""

    def __init__(self, meter: Meter, *, body_bytes: int, choices: int, most: object) -> None:
        """`most`: how many tokens the client wants of a choice, if it says so."""
        self._meter = meter
        self._body_bytes, self._choices = body_bytes, choices
        self._most = most if isinstance(most, int) else None
        self._asked_at = math.inf
        self._counted = False

    @classmethod
    def of(cls, meter: Meter, upstream: Mapping[str, Any], *, body_bytes: int, choices: int) -> Self:
        """That of a request as the engine gets it."""
        most = next((value for name in _LENGTHS if (value := upstream.get(name)) is not None), None)
        return cls(meter, body_bytes=body_bytes, choices=choices, most=most)

    @contextmanager
    def while_asking(self, transcript: Transcript) -> Iterator[None]:
        """An engine is asked meanwhile; what is broken off is counted as far as it has come."""
        self._asked_at = time.monotonic()
        try:
            yield
        except asyncio.CancelledError:  # a time limit, too
            self.count(transcript, broken_off=True)
            raise

    def count(self, transcript: Transcript, *, broken_off: bool = False) -> None:
        """Count the tokens of a reply as far as it has come; `broken_off`: nobody waited for the rest."""
        if self._counted:
            return
        self._counted = True
        self._meter.count_tokens(transcript.tokens or self._estimate(transcript, broken_off or transcript.broken))

    def _estimate(self, transcript: Transcript, broken_off: bool) -> int:
        characters = sum(len(text) for choice in transcript.choices.values() for text in choice.text)
        sampled_s = max(0.0, time.monotonic() - self._asked_at) if broken_off else 0.0
        sampled = math.ceil(sampled_s * _TOKENS_PER_S)
        if self._most is not None:
            sampled = min(sampled, max(0, self._most))
        return tokens_of(self._body_bytes + characters) + sampled * self._choices


def tokens_of(size: int) -> int:
    """About how many tokens so many bytes of text are."""
    return -(-size // BYTES_A_TOKEN)
