"""This file is `tuneloop export`: rows of the ledger, in the formats that TRL and Hugging Face datasets read.

A function that makes a row of a reply, or of two, returns the reason as a sentence where a reply is left out.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, assert_never

import numpy as np
import orjson
import typer

from tuneloop.cli.files import Draft, Format, Row, in_turn
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, TenantOption, tell, with_progress
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import Kind, State, message_of
from tuneloop.shared.ledger.export import NO_ANSWER, PAGE, ExportedReply, Ranked, Selection
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.privacy.vocabulary import Vocabulary
from tuneloop.shared.settings.loader import read_settings

Message = dict[str, Any]

EVENT = (
    *("event_id", "call_id", "msg_id", "choice", "task_id", "run_id", "kind", "metric", "value", "text"),
    *("other_msg_id", "other_choice", "source", "received_at", "occurred_at", "outcome"),
)

#: The reason of replies that were imported from plain conversations. They are examples: they need no reward.
NO_TOKEN_IDS = "imported: no token ids"

_CLOSE = "</think>"


def sft(
    reply: ExportedReply,
    *,
    min_reward: float | None = None,
    everything: bool = False,
    vocabulary: Vocabulary | None = None,
) -> Row | str:
    """A conversation that ends with the answer, and its reasoning: the reply, as the tokens of the `vocabulary` spell
    it, or its edited version."""
    if reason := _why_unusable(reply):
        return reason
    edited = latest_edit(reply)
    if edited is not None:
        answer = _edited_answer(edited)
        message = _written_message(edited.text) or {}
        reasoning = message.get("reasoning_content") or message.get("reasoning")
    else:
        if reason := _why_no_answer(reply, everything):
            return reason
        if reply.reward is None:
            if reply.reason != NO_TOKEN_IDS and (not everything or min_reward is not None):
                return "no reward"
        elif min_reward is not None and reply.reward < min_reward:
            return "too low a reward"
        answer = _answer(reply)
        # What the reply's tokens spell in its think block, where that is not in its text.
        pieces = None if vocabulary is None or _CLOSE in reply.text else vocabulary.spell(reply.numbers[1])
        thought, closed, _ = b"".join(pieces or ()).decode(errors="replace").partition(_CLOSE)
        reasoning = thought.rpartition("<think>")[2].strip("\n") if closed else None
    answer |= {"reasoning_content": reasoning} if reasoning else {}
    row = {"messages": [*_messages(reply), answer], **_tools(reply), "reward": reply.reward}
    return row | _labels(reply) | {"feedback_sources": _sources([edited] if edited is not None else reply.events)}


def kto(reply: ExportedReply, *, everything: bool = False) -> Row | str:
    if reason := _why_unusable(reply) or _why_no_answer(reply, everything):
        return reason
    said = [event for event in current_feedback(reply) if event.kind == Kind.BOOLEAN]
    own = [event for event in said if event.msg_id is not None]
    thumbs = {event.source: event for event in own or said}
    votes = sum(1 if event.value else -1 for event in thumbs.values())
    if not votes:
        return "no thumbs" if not thumbs else "as many thumbs up as down"
    row = {"prompt": _messages(reply), "completion": [_answer(reply)], "label": votes > 0}
    return row | _tools(reply) | _labels(reply) | {"feedback_sources": _sources(thumbs.values())}


def dpo_of_edit(reply: ExportedReply) -> Row | str:
    edited = latest_edit(reply)
    if edited is None:
        return "no preference"
    if reason := _why_unusable(reply) or _why_no_answer(reply):
        return reason
    answers = {"chosen": [_edited_answer(edited)], "rejected": [_answer(reply)]}
    if edited.text == reply.text or answers["chosen"] == answers["rejected"]:
        return "edited without a change"
    return _pair(reply, None, answers, source="demonstration") | {"feedback_sources": _sources([edited])}


def dpo_of_two(better: ExportedReply, worse: ExportedReply, *, source: str, events: Iterable[Any]) -> Row | str:
    if reason := _why_unusable(better) or _why_unusable(worse) or _why_no_answer(better) or _why_no_answer(worse):
        return reason
    if (_messages(better), _tools(better)) != (_messages(worse), _tools(worse)):
        return "not the same prompt"
    answers = {"chosen": [_answer(better)], "rejected": [_answer(worse)]}
    if answers["chosen"] == answers["rejected"]:
        return "the same answer twice"
    return _pair(better, worse, answers, source=source) | {"feedback_sources": _sources(events)}


def experience(reply: ExportedReply) -> Row:
    prompt_ids, completion_ids, logprobs = reply.numbers
    kept = {
        name: getattr(reply, name)
        for name in ExportedReply.__slots__
        if name not in {"id", "blob", "events", "request"}
    }
    return kept | {
        "request": reply.request.decode(errors="replace"),
        "messages": _messages(reply),
        "tool_calls": _tool_calls(reply),
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": logprobs,
        "feedback": [{name: getattr(event, name) for name in EVENT} for event in reply.events],
    }


def current_feedback(reply: ExportedReply) -> list[Any]:
    """The feedback about a reply that was not retracted: that on its run, then its own, each as it came."""
    events: list[Any] = []
    for event in sorted(reply.events, key=lambda event: event.msg_id is not None):
        if not reply.is_subject_of(event):
            continue
        if event.kind == Kind.RETRACTION:
            events = [each for each in events if _statement(each) != _statement(event)]
        else:
            events.append(event)
    return events


def _statement(event: Any) -> object:
    return event.metric, event.source, event.msg_id is None


def latest_edit(reply: ExportedReply) -> Any | None:
    edits = [event for event in current_feedback(reply) if event.kind == Kind.DEMONSTRATION]
    return edits[-1] if edits else None


def current_preferences(reply: ExportedReply) -> Iterator[Any]:
    return (event for event in current_feedback(reply) if event.kind == Kind.PREFERENCE)


def preference_between(one: ExportedReply, other: ExportedReply) -> Any | None:
    events = [
        event
        for a, b in ((one, other), (other, one))
        for event in current_preferences(a)
        if event.other_msg_id == b.msg_id and event.other_choice in (None, b.choice)
    ]
    return max(events, key=lambda event: event.id, default=None)


def digest(prompt_ids: bytes) -> int | None:
    """A number for a prompt; None for a prompt without ids."""
    return int.from_bytes(hashlib.blake2b(prompt_ids, digest_size=8).digest()) if prompt_ids else None


def best_and_worst(ranked: Sequence[Ranked], *, margin: float) -> Iterator[tuple[int, int]]:
    """For each prompt with several replies: the ids of the best and of the worst, where they differ by the margin."""
    if not ranked:
        return
    whole = Ranked(*(np.concatenate(parts) for parts in zip(*ranked, strict=True)))
    order = np.lexsort((whole.ids, whole.rewards, whole.prompts))
    ids, rewards, prompts = (each[order] for each in whole)
    starts = np.flatnonzero(np.r_[True, prompts[1:] != prompts[:-1]][: len(prompts)])
    ends = np.r_[starts[1:], len(prompts)] - 1
    for worst, best in zip(starts, ends, strict=True):
        if rewards[best] > rewards[worst] and rewards[best] - rewards[worst] >= margin:
            yield int(ids[best]), int(ids[worst])


def _why_unusable(reply: ExportedReply) -> str | None:
    if reply.reason == "opt_out":
        return "opted out of training"
    if not _messages(reply):
        return "no messages in the request"
    return None


def _why_no_answer(reply: ExportedReply, everything: bool = False) -> str | None:
    if not reply.text and not reply.tool_calls:
        return "empty"
    if (reply.reason in NO_ANSWER or reply.finish_reason is None) and not everything:
        return "cut off"
    return None


def _pair(reply: ExportedReply, other: ExportedReply | None, answers: Row, *, source: str) -> Row:
    about_the_other = {
        "other_msg_id": other.msg_id if other else None,
        "other_user": other.user if other else None,
        "other_reward": other.reward if other else None,
    }
    row = {"prompt": _messages(reply), **answers, **_tools(reply), "source": source, "reward": reply.reward}
    return row | _labels(reply) | about_the_other


def _labels(reply: ExportedReply) -> Row:
    return {
        "msg_id": reply.msg_id,
        "user": reply.user,
        "task_id": reply.task_id,
        "run_id": reply.run_id,
        "version": reply.version_max,
    }


def _sources(events: Iterable[Any]) -> list[str]:
    return sorted({event.source for event in events if event.source is not None})


def _answer(reply: ExportedReply) -> Message:
    calls = _tool_calls(reply)
    return {"role": "assistant", "content": reply.text} | ({"tool_calls": calls} if calls else {})


def _edited_answer(event: Any) -> Message:
    """The edited answer in place of the reply: a text, or the JSON of the assistant's message."""
    message = _written_message(event.text)
    if message is None:
        return {"role": "assistant", "content": event.text}
    calls = message.get("tool_calls")
    return {"role": "assistant", "content": message.get("content") or ""} | ({"tool_calls": calls} if calls else {})


def _written_message(text: str) -> Message | None:
    """The assistant's message that a text is the JSON of, if it is one that can be written in a row."""
    message = message_of(text)
    try:
        orjson.dumps([[message]])  # what is read may be nested more deeply than what can be written
    except orjson.JSONEncodeError:
        return None
    return message


def _tool_calls(reply: ExportedReply) -> list[Row] | None:
    return orjson.loads(reply.tool_calls) if reply.tool_calls else None


def _tools(reply: ExportedReply) -> Row:
    tools = _body(reply).get("tools")
    return {"tools": tools if isinstance(tools, list) and tools else None}


def _messages(reply: ExportedReply) -> list[Message]:
    """What the reply answered; a request that has its system prompt beside its messages has it first here."""
    body = _body(reply)
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return []
    system = [{"role": "system", "content": body["system"]}] if messages and body.get("system") else []
    return system + messages


def _body(reply: ExportedReply) -> Row:
    try:
        body = orjson.loads(reply.request)
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


class ExportRequest(NamedTuple):
    """What to export. `everything` includes replies that are cut off or have no reward.

    `min_reward` excludes lower rewards, `margin` excludes pairs with closer rewards. The `vocabulary` decodes the
    reasoning of replies from their tokens.
    """

    format: Format
    selection: Selection
    min_reward: float | None = None
    margin: float = 0.0
    everything: bool = False
    vocabulary: Vocabulary | None = None


class ExportResult(NamedTuple):
    rows: int
    left_out: Counter[str]


def export(ledger: Ledger, request: ExportRequest, path: Path) -> ExportResult:
    """Write the file, and record it in the ledger so that an erasure reaches it."""
    path = path.absolute()
    while True:
        erased = ledger.exports.erasures_so_far(request.selection.tenant)
        left_out: Counter[str] = Counter()
        with Draft(path, request.format) as draft:
            for row in with_progress(_rows(ledger, request), f"writing {path.name}"):
                if isinstance(row, str):
                    left_out[row] += 1
                else:
                    draft.write(row)
            written = False

            def publish(draft: Draft = draft) -> None:
                nonlocal written
                draft.publish()
                written = True

            try:
                with in_turn(path):  # before the transaction: nothing waits for the erasure of a large file
                    if ledger.exports.record_file(
                        str(path), request.format, draft.rows, of=request.selection, unless=erased, publish=publish
                    ):
                        return ExportResult(draft.rows, left_out)
            except BaseException:
                if written:  # no erasure would reach a file that the ledger does not list
                    path.unlink(missing_ok=True)
                raise


def _rows(ledger: Ledger, request: ExportRequest) -> Iterator[Row | str]:
    match request.format:
        case Format.SFT:
            for reply in _replies(ledger, request):
                yield sft(
                    reply,
                    min_reward=request.min_reward,
                    everything=request.everything,
                    vocabulary=request.vocabulary,
                )
        case Format.KTO:
            for reply in _replies(ledger, request):
                yield kto(reply, everything=request.everything)
        case Format.DPO:
            yield from _preferred_pairs(ledger, request)
            yield from _pairs_by_reward(ledger, request)
        case Format.EXPERIENCES:
            for page in ledger.exports.replies(request.selection, everything=True):
                for reply in page:
                    low = request.min_reward is not None and (reply.reward is None or reply.reward < request.min_reward)
                    yield "too low a reward" if low else experience(reply)
        case never:
            assert_never(never)


def _replies(ledger: Ledger, request: ExportRequest) -> Iterator[ExportedReply]:
    for page in ledger.exports.replies(request.selection):
        yield from page


def _preferred_pairs(ledger: Ledger, request: ExportRequest) -> Iterator[Row | str]:
    for page in ledger.exports.replies(request.selection):
        msg_ids = {event.other_msg_id for reply in page for event in reply.events if event.kind == Kind.PREFERENCE}
        others: dict[tuple[str, int | None], ExportedReply] = {}  # by msg_id and choice; without a choice, the first
        for reply in ledger.exports.replies_named(request.selection.tenant, msg_ids):
            others[reply.msg_id, reply.choice] = reply
            others.setdefault((reply.msg_id, None), reply)
        for reply in page:
            if latest_edit(reply) is not None:
                yield dpo_of_edit(reply)
            for name in dict.fromkeys((event.other_msg_id, event.other_choice) for event in current_preferences(reply)):
                if (other := others.get(name)) is None:
                    yield "the other reply is not in the ledger"
                    continue
                event = preference_between(reply, other)
                if event is not None and event.msg_id == reply.msg_id and event.choice in (None, reply.choice):
                    yield dpo_of_two(reply, other, source="preference", events=[event])


def _pairs_by_reward(ledger: Ledger, request: ExportRequest) -> Iterator[Row | str]:
    ranked = list(ledger.exports.ranked_replies(request.selection, digest))
    pairs = best_and_worst(ranked, margin=request.margin)
    while page := list(islice(pairs, PAGE)):
        replies = ledger.exports.replies_by_id({each for pair in page for each in pair})
        for best, worst in ((replies.get(best), replies.get(worst)) for best, worst in page):
            if best is None or worst is None:
                continue
            if request.min_reward is not None and (best.reward or 0.0) < request.min_reward:
                yield "too low a reward"
            elif preference_between(best, worst) is not None:
                yield "paired by a preference already"
            else:
                events = [*best.events, *worst.events]
                yield dpo_of_two(best, worst, source="reward", events=events)


def _timestamp(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a time; write 2026-01-31 or 2026-01-31T12:00:00+01:00") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def export_(
    config: ConfigOption,
    format: Annotated[Format, typer.Option(help="What the file is for.")],
    to: Annotated[Path, typer.Option(metavar="FILE", help="A .jsonl or .parquet file; an existing one is replaced.")],
    state: Annotated[list[State] | None, typer.Option(help="Only rows in this state; may be repeated.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rewards as high; an edited answer needs none.")] = None,
    margin: Annotated[float, typer.Option(help="dpo: the least difference of the rewards of two replies.")] = 0.0,
    since: Annotated[
        float | None, typer.Option(parser=_timestamp, metavar="ISO", help="Sampled then or later.")
    ] = None,
    until: Annotated[
        float | None, typer.Option(parser=_timestamp, metavar="ISO", help="Sampled then or before.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only this task_id.")] = None,
    all: Annotated[bool, typer.Option("--all", help="sft, kto: also replies cut off; sft: without a reward.")] = False,
    tenant: TenantOption = "default",
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Write replies to a file, for SFT, DPO, KTO, or with everything that the ledger holds about them."""
    if format is Format.KTO and min_reward is not None:
        raise typer.BadParameter("kto goes by thumbs, not by rewards", param_hint="--min-reward")
    selection = Selection(tenant, tuple(state or ()), task, since, until)
    settings = read_settings(config, set_ or ()).valid_settings()
    vocabulary = Vocabulary.load(settings.model.model_path)
    request = ExportRequest(format, selection, min_reward, margin, all, vocabulary)
    schema = settings.buffer.trainer_input.experience_buffer.name
    present, newest = revisions.current(settings.database_url, schema=schema), revisions.newest()
    if present is None:
        raise EnvironmentRefused("the database is empty: nothing has been recorded with these settings")
    if present != newest:
        raise EnvironmentRefused(f"the database has schema {present}, not {newest}: run tuneloop db upgrade")
    with closing(Ledger.of(settings)) as ledger:
        ledger.require_owner(settings.project, settings.name)
        result = export(ledger, request, to)
    left_out = dict(sorted(result.left_out.items()))
    lines = [f"{to}: {result.rows} rows", *(f"  left out {count}: {reason}" for reason, count in left_out.items())]
    tell({"file": str(to), "rows": result.rows, "left_out": left_out}, *lines, for_programs=for_programs)
