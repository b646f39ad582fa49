"""The pieces of a streamed chat completion that hold tokens and nothing else, read without parsing JSON."""

import re
from array import array
from binascii import a2b_base64

import msgspec

from tuneloop.explorer.transcript import ChatTranscript

_BEFORE_CHOICES = b'"choices":[{"index":'
_ID = rb"(?:0|[1-9]\d{0,9})"

#: What follows `_BEFORE_CHOICES`: index, field, text, log-probabilities, the same packed, ids.
_TOKEN_PIECE = re.compile(
    rb'(0|[1-9]\d{0,6}),"delta":\{(?:"(content|reasoning|reasoning_content)":"([^"\\\x00-\x1f]*)")?\},'
    rb'"logprobs":(null|\{"content":null,"packed":"([^"\\\x00-\x1f]*)"\}),'
    rb'"finish_reason":null,"token_ids":\[(%b(?:,%b)*)\]\}\]\}' % (_ID, _ID)
)


class _PieceHead(msgspec.Struct, forbid_unknown_fields=True):
    """A piece without its choices."""

    id: str
    object: str
    created: int
    model: str
    choices: list[None]
    system_fingerprint: str | None = None


_piece_heads = msgspec.json.Decoder(_PieceHead)


class TokenPieces:
    """Reads the pieces of one stream that hold tokens and nothing else, which is nearly all, without parsing JSON.

    What such a piece begins with is the same in all of a stream, and is learnt from the first one that the transcript
    has read. What an engine writes in any other way, the transcript reads. The client gets neither ids nor
    log-probabilities.
    """

    def __init__(self, transcript: ChatTranscript) -> None:
        self._transcript = transcript
        self._start = b""

    def learn(self, piece: bytes) -> None:
        """See what the others begin with, from a piece that has been read."""
        if self._start:
            return
        head, found, _ = piece.partition(_BEFORE_CHOICES)
        try:
            named = _piece_heads.decode(head + b'"choices":[]}').id
        except msgspec.DecodeError:
            return
        if found and named == self._transcript.msg_id:
            self._start = head + found

    def read(self, piece: bytes) -> bytes | None:
        """Take down a piece that holds tokens only; what the client gets of it, empty if it gets nothing.

        None if it holds anything else.
        """
        start = self._start
        if (
            self._transcript.renaming
            or not start
            or not piece.startswith(start)
            or (found := _TOKEN_PIECE.fullmatch(piece, len(start))) is None
        ):
            return None
        index, field, text, _, packed, ids = found.groups()
        if (choice := self._transcript.choices.get(int(index))) is None:
            return None
        try:
            said, logprobs = (text or b"").decode(), array("f", a2b_base64(packed or b"", strict_mode=True))
        except ValueError:  # the transcript says what is wrong with it
            return None
        if said and field == b"content":
            choice.text.append(said)
        numbers = [int(ids)] if ids.isdigit() else list(map(int, ids.split(b",")))
        choice.take_down(numbers, logprobs, captured=self._transcript.captured)
        if field is None:
            return b""
        return piece[: found.start(4)] + b'null,"finish_reason":null,"token_ids":null}]}'
