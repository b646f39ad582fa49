"""What a list shows of a request: the beginning of what its page says last."""

import json

import pytest

from tuneloop.explorer.ui.conversation import last_words


def said(**body: object) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("request_", "shown"),
    [
        (said(messages=[{"role": "user", "content": "first"}, {"role": "user", "content": "last é😀"}]), "last é😀"),
        (said(messages=[{"content": "first"}, None]), "first"),
        (said(messages=[{"content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"text": "b"}]}]), "a\nb"),
        (said(messages=[{"content": [1]}]), "[1]"),
        (said(messages=[{"content": None}]), ""),
        (said(messages=[], system="be kind"), "be kind"),
        (said(input="a question", instructions="be brief"), "a question"),
        (said(prompt=["once", "twice"]), '["once", "twice"]'),
        (said(), ""),
        (said(messages="x" * 1000), "x" * 20),
        (b"no JSON \xff", "no JSON \ufffd"),
        (b"[" * 100_000, "[" * 20),
    ],
)
def test_a_list_shows_the_beginning_of_what_was_said_last(request_: bytes, shown: str):
    assert last_words(request_, 20) == shown
