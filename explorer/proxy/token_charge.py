"""What a request costs its key in tokens: what the engine told of it, or an estimate where it told nothing."""

import math
import time

from tuneloop.explorer.capture.transcript import Transcript
from tuneloop.explorer.http.caller import Meter

#: Of text, for which an engine told no tokens.
BYTES_A_TOKEN = 4

#: How fast a reply is taken to be sampled of which the client did not wait to hear.
_TOKENS_PER_S = 50


class TokenCharge:
    """The tokens of one request, which are counted once, however it ends."""

    def __init__(self, meter: Meter, *, body_bytes: int, choices: int, most: object) -> None:
        """`most`: how many tokens the client wants of a choice, if it says so."""
        self._meter = meter
        self._body_bytes, self._choices = body_bytes, choices
        self._most = most if isinstance(most, int) else None
        self._asked_at = math.inf
        self._counted = False

    def begin(self) -> None:
        """An engine is asked now."""
        self._asked_at = time.monotonic()

    def count(self, transcript: Transcript, *, broken_off: bool = False) -> None:
        """Count the tokens of a reply as far as it has come; `broken_off`: nobody waited for the rest."""
        if self._counted:
            return
        self._counted = True
        self._meter.count_tokens(transcript.tokens or self._estimate(transcript, broken_off))

    def _estimate(self, transcript: Transcript, broken_off: bool) -> int:
        told = sum(len(text) for choice in transcript.choices.values() for text in choice.text)
        sampled_s = max(0.0, time.monotonic() - self._asked_at) if broken_off else 0.0
        sampled = math.ceil(sampled_s * _TOKENS_PER_S)
        if self._most is not None:
            sampled = min(sampled, max(0, self._most))
        return tokens_of(self._body_bytes + told) + sampled * self._choices


def tokens_of(size: int) -> int:
    """About how many tokens so many bytes of text are."""
    return -(-size // BYTES_A_TOKEN)
