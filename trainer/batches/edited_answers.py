"""Encodes edited answers as token ids, at the place where the chat template puts an answer.

A thinking model's prompt may end inside a think block, after one, or before it. The prompt's end tells which, and the
template, rendered with a short conversation, how an answer continues it.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tuneloop.shared.experience import REDACTED, Sample, message_of
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.tokenizer import ends_of, tokenizer_of

_TEXT = "tuneloop-answer"  # placeholder of the answer's text in a rendered template
_TAIL = 2048  # tokens at a prompt's end that are decoded

#: Template arguments that switch thinking on and off.
_SWITCHES: tuple[dict[str, Any], ...] = (
    {},
    *({name: on} for name in ("enable_thinking", "thinking") for on in (True, False)),
)

_QUESTION = {"role": "user", "content": "x"}
_CALL_ID = "call00000"

#: Opening and closing marks of think blocks other than XML tags, as in vLLM's reasoning parsers.
_MARKS = (
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
)
_TAG = re.compile(r"<((?:\w+[:|])?think\w*)>")

_NO_PLACE = "the edited answer is empty, or the chat template has no place for it"
_UNKNOWN_PLACE = "where the chat template puts the edited answer, behind the think block, is unknown"


class _Answer(NamedTuple):
    text: str
    reasoning: str
    calls: list[dict[str, Any]]


class _Marks(NamedTuple):
    """The opening and closing mark of a think block."""

    opens: str
    closes: str

    def is_open(self, text: str) -> bool:
        return text.rfind(self.opens) > text.rfind(self.closes)


class _Turn(NamedTuple):
    """The template's text between the prompt and the answer's text, after it, and the turn's end token, if known."""

    lead: str
    rest: str
    end: str | None


def edited_answer_ids(sample: Sample, answer: str, settings: Settings) -> list[int] | str:
    """The token ids of an edited answer, or the reason without any."""
    words = tokenizer_of(settings)
    ends = ends_of(settings.model.model_path, words)
    try:
        parts = _parts_of(answer, _marks_of(words))
        turn = _turn(sample, parts, words, ends)
    except Unwritable as reason:
        return str(reason)
    text = turn.lead + parts.text + turn.rest
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON escapes allow unpaired surrogates
        return "the edited answer is not Unicode: half of a surrogate pair is in it"
    names = dict(zip(words.convert_ids_to_tokens(ends), ends, strict=True))
    own = int(sample.completion_ids[-1]) if len(sample.completion_ids) else None
    end = names[turn.end] if turn.end is not None else own if own in ends and own is not None else ends[0]
    return [*words.encode(text, add_special_tokens=False), end]


class Unwritable(Exception):
    pass


@cache
def _marks_of(words: PreTrainedTokenizerBase) -> _Marks:
    """The marks in the model's chat template, otherwise the usual tags."""
    template = str(words.chat_template or "")
    tag = _TAG.search(template)
    name = tag[1] if tag else "think"
    return _Marks(*next((each for each in _MARKS if each[0] in template), (f"<{name}>", f"</{name}>")))


def _parts_of(answer: str, marks: _Marks) -> _Answer:
    message = message_of(answer) or {"content": answer}
    text, calls = message.get("content") or "", message.get("tool_calls") or []
    if not isinstance(text, str):
        raise Unwritable("the edited answer is more than text")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if marks.closes in text:  # the engine does not separate the two
        before, _, text = text.rpartition(marks.closes)
        reasoning, text = before.rpartition(marks.opens)[2], text.lstrip("\n")
    if not text and not calls:
        raise Unwritable(_NO_PLACE)
    return _Answer(text, str(reasoning).strip("\n"), with_parsed_arguments(calls))


def _turn(sample: Sample, answer: _Answer, words: PreTrainedTokenizerBase, ends: Sequence[int]) -> _Turn:
    """How the sample's prompt continues with the answer."""
    tail, reply = _text_of(sample.prompt_ids[-_TAIL:], words), _text_of(sample.completion_ids, words)
    marks = _marks_of(words)
    openings, thinks = _openings(words), marks.opens in str(words.chat_template or "")
    fitting = [each for each in openings if tail.endswith(each.ends_with)]
    opening = max(fitting, key=lambda each: len(each.ends_with), default=None)
    if opening is not None:
        turn = _by_template(opening, answer, words, ends)
    elif answer.calls:
        turn = _by_template(openings[0], answer, words, ends) if openings and not thinks else None
    else:  # not a template's prompt, or one that ends inside a reply
        turn = None if thinks and not openings else _Turn("", "", None)
    if turn is None or (answer.calls and turn.end is None):
        raise Unwritable(_UNKNOWN_PLACE if thinks else _NO_PLACE)
    if marks.closes in turn.lead + turn.rest:
        return turn
    if opening is None and marks.is_open(tail):
        return turn._replace(lead=f"{answer.reasoning}\n{marks.closes}\n\n{turn.lead}")
    if reply.lstrip().startswith(marks.opens):  # the model, not the template, writes the block
        return turn._replace(lead=f"{marks.opens}\n{answer.reasoning}\n{marks.closes}\n\n{turn.lead}")
    return turn


class _Opening(NamedTuple):
    """A way to render the conversation: the switch, the question alone, and the end of such a prompt."""

    switch: dict[str, Any]
    question: str
    ends_with: str


@cache
def _openings(words: PreTrainedTokenizerBase) -> list[_Opening]:
    """Distinct ends of prompts of this template."""
    found: dict[str, _Opening] = {}
    for switch in _SWITCHES if words.chat_template is not None else ():
        question = _render(words, [_QUESTION], switch)
        prompt = _render(words, [_QUESTION], switch, add_generation_prompt=True)
        if question is not None and prompt is not None and prompt.startswith(question) and prompt != question:
            ends_with = prompt[len(question) :]
            found.setdefault(ends_with, _Opening(switch, question, ends_with))
    return list(found.values())


def _by_template(
    opening: _Opening, answer: _Answer, words: PreTrainedTokenizerBase, ends: Sequence[int]
) -> _Turn | None:
    """The template's text around an answer; None if unknown."""
    marks = _marks_of(words)
    before, _, opened = opening.ends_with.partition(marks.opens)
    if not opened and marks.closes in before:  # thinking is off: no opening mark
        before = before.partition(marks.closes)[0]
    before = before.rstrip()
    whole = _render(words, [_QUESTION, _message(answer)], opening.switch)
    if whole is None or not whole.startswith(opening.question + before):
        return None
    written = whole[len(opening.question) :]
    if not written.startswith(opening.ends_with):
        # The template drops or rewrites the block: close the prompt's own if it is open.
        block = re.compile(rf"\s*(?:{re.escape(marks.opens)})?(.*?){re.escape(marks.closes)}\s*", re.DOTALL)
        found_block = block.match(written, len(before))
        written = written[found_block.end() if found_block else len(before) :].lstrip()
        if marks.is_open(opening.ends_with):
            written = f"{answer.reasoning}\n{marks.closes}\n\n{written}"
    else:
        written = written[len(opening.ends_with) :]
    if marks.is_open(opening.ends_with) and marks.closes not in written:
        return None
    if answer.reasoning and marks.closes in written and answer.reasoning not in written:
        written = written.replace(marks.closes, f"{answer.reasoning}\n{marks.closes}", 1)
    lead, found, behind = written.partition(_TEXT)
    if not found and answer.text:
        return None
    if not answer.text:
        lead, behind = "", written
    names = words.convert_ids_to_tokens(list(ends))
    last = max(((behind.rfind(name), name) for name in names if name in behind), default=None)
    if last is not None:
        return _Turn(lead, behind[: last[0]], last[1])
    return _Turn(lead, behind.rstrip(), _next_role(written, answer, opening, words, names))


def _next_role(
    written: str, answer: _Answer, opening: _Opening, words: PreTrainedTokenizerBase, ends: Sequence[str]
) -> str | None:
    """The token that begins the next turn, if that ends a reply, as with GLM."""
    after = [{"role": "tool", "content": "x", "tool_call_id": _CALL_ID}] if answer.calls else [_QUESTION]
    whole = _render(words, [_QUESTION, _message(answer), *after], opening.switch) or ""
    # Templates rewrite blocks of earlier turns, so only the text after the block is searched.
    _, found, following = whole.rpartition(written.rpartition(_marks_of(words).closes)[2].strip())
    return next((end for end in ends if found and following.lstrip().startswith(end)), None)


def _message(answer: _Answer) -> dict[str, Any]:
    message = {"role": "assistant", "content": _TEXT if answer.text else ""}
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    return message | ({"tool_calls": answer.calls} if answer.calls else {})


def _render(
    words: PreTrainedTokenizerBase, turns: list[dict[str, Any]], switch: dict[str, Any], **options: Any
) -> str | None:
    """The conversation in the template; None if it refuses."""
    try:
        return cast(str, words.apply_chat_template(turns, tokenize=False, **switch, **options))
    except (TemplateError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _text_of(ids: Any, words: PreTrainedTokenizerBase) -> str:
    return cast(str, words.decode([int(each) for each in ids if each != REDACTED], skip_special_tokens=False))


def with_parsed_arguments(calls: Any) -> list[dict[str, Any]]:
    """Parse the calls' JSON arguments, as templates need objects. Raises Unwritable."""
    parsed = []
    try:
        for call in calls:
            function = dict(call.get("function") or {})
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
            parsed.append({"id": _CALL_ID, **call, "function": function})
    except (AttributeError, TypeError, ValueError, RecursionError):
        raise Unwritable(_NO_PLACE) from None
    return parsed
