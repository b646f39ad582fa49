"""What redaction costs for a recorded exchange of 2 000 tokens: CPU time of its thread, side by side with none.

    python -m benchmarks.ledger.redaction

1 700 tokens of prompt in ten messages, 300 of reply, of a vocabulary of 150 000 words. Each way encodes the exchange as
the recorder does; the ways take turns, and the medians of all turns are told.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import orjson

from tuneloop.shared.experience import Exchange, Experience, encode, pack_ids, pack_logprobs
from tuneloop.shared.privacy.detection import Detector
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.privacy.vocabulary import Vocabulary
from tuneloop.shared.settings.feedback import PrivacySettings

_WORDS, _MESSAGES, _MESSAGE_TOKENS, _REPLY_TOKENS = 150_000, 10, 170, 300
_TURNS = 400
_FOUND = " Write to ann.smith@example.org or +44 20 7946 0958, key sk-proj-abcdefgh12345678."
_ALL = ("private_key", "jwt", "api_key", "email", "iban", "credit_card", "us_ssn", "ip_address", "phone")


def _vocabulary() -> list[bytes]:
    letters = "etaoinshrdlucmfwypvbgkq"
    words = map("".join, itertools.product(letters, repeat=4))
    bytes_first = [bytes([each]) for each in range(256)]
    return bytes_first + [f" {word}".encode() for word in itertools.islice(words, _WORDS)]


def _exchange(pieces: Sequence[bytes], found: str) -> Exchange:
    random = np.random.default_rng(0)

    def some(count: int) -> list[int]:
        return [int(each) for each in random.integers(256, len(pieces), count)]

    messages = [some(_MESSAGE_TOKENS) for _ in range(_MESSAGES)]
    reply = some(_REPLY_TOKENS) + list(found.encode())
    prompt = [token for message in messages for token in message] + list(found.encode())
    text = [b"".join(pieces[each] for each in message).decode() for message in messages]
    text[-1] += found
    said = Experience(
        choice=0,
        prompt_ids=pack_ids(prompt),
        completion_ids=pack_ids(reply),
        logprobs=pack_logprobs([-0.5] * len(reply)),
        version_min=0,
        version_max=0,
        temperature=1.0,
        finish_reason="stop",
        text=b"".join(pieces[each] for each in reply).decode(),
    )
    body = {"model": "m", "messages": [{"role": "user", "content": each} for each in text]}
    return Exchange(
        msg_id="chatcmpl-x",
        tenant="default",
        endpoint="/v1/chat/completions",
        request=orjson.dumps(body),
        received_at=0.0,
        latency_s=1.0,
        experiences=(said,),
    )


def _redactor(vocabulary: Vocabulary, **privacy: object) -> Redactor:
    return Redactor(Detector(PrivacySettings.model_validate(privacy)), key=bytes(32), vocabulary=vocabulary)


def main() -> None:
    """Print a line for each way."""
    pieces = _vocabulary()
    vocabulary = Vocabulary(pieces)
    clean, found = _exchange(pieces, ""), _exchange(pieces, _FOUND)
    default, everything = _redactor(vocabulary), _redactor(vocabulary, redact=_ALL)
    own = _redactor(vocabulary, redact=_ALL, patterns={"ticket": r"\bTCK-\d+-\w+"})
    ways: dict[str, Callable[[], object]] = {
        "off": lambda: encode(clean),
        "default, nothing found": lambda: encode(default.exchange(clean)),
        "all kinds, nothing found": lambda: encode(everything.exchange(clean)),
        "all kinds, three found": lambda: encode(everything.exchange(found)),
        "all kinds and a pattern, nothing found": lambda: encode(own.exchange(clean)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_TURNS):
        for name, way in ways.items():
            began = time.thread_time()
            way()
            times[name].append(time.thread_time() - began)
    for name, taken in times.items():
        print(f"{name:<40} {statistics.median(taken) * 1e6:8.0f} us")


if __name__ == "__main__":
    main()
