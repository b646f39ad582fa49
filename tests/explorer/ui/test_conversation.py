"""What a list shows of a request: the beginning of what its page says last."""

import json

import pytest

from tuneloop.explorer.ui.reading.conversation import last_words, read_request


def said(**body: object) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    "request_",
    [
        said(messages=[{"role": "user", "content": "first"}, {"role": "user", "content": "last é😀"}]),
        said(messages=[{"content": "first"}, None]),
        said(messages=[{"content": "first"}, {"role": "tool"}]),
        said(messages=[{"content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"text": "b"}]}]),
        said(messages=[{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
        said(messages=[{"content": [1]}]),
        said(messages=[{"content": None}]),
        said(messages=[{"content": 7}]),
        said(messages=["words"]),
        said(messages={"content": "alone"}),
        said(messages=[], system="be kind"),
        said(messages=None, input="not this", instructions="be brief", system="be kind"),
        said(input="a question", instructions="be brief"),
        said(input=[{"type": "function_call_output", "output": "7"}]),
        said(prompt="once upon", system=""),
        said(prompt=["once", "twice"]),
        said(prompt=["x"], messages=[{"content": "a"}]),
        said(instructions=[{"text": "be brief"}]),
        said(),
        said(messages="x" * 1000),
        b"[1, 2]",
        b"no JSON \xff",
        b'{"messages": [{"content": "half',
        b"[" * 100_000,
    ],
)
def test_a_list_shows_the_beginning_of_what_was_said_last(request_: bytes):
    turns = read_request(request_).turns
    assert last_words(request_, 20) == (turns[-1].text[:20] if turns else "")


def test_what_is_no_text_is_shown_as_it_was_sent():
    assert last_words(b'{"prompt": [1,2,  3]}', 9) == "[1,2,  3]"
