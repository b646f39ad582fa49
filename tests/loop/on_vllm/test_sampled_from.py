"""What is trained on was sampled from what the trainer recomputes; what was not is marked, and kept for other uses."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import pytest
import torch

from tests.loop.harness.services import Service, commit
from tuneloop.cli.exports import ExportRequest, Format, export
from tuneloop.shared.experience import Sample, State
from tuneloop.shared.ledger.export import ExportedReply, Selection
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.settings.serving import CaptureSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.batch import TokenSequence, collate, micro_batches
from tuneloop.trainer.batches.selection import select
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.recomputation import Recomputation
from tuneloop.trainer.micro_batch import MicroBatch
from tuneloop.trainer.models.model import Actor

pytestmark = pytest.mark.vllm

Json = dict[str, Any]

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"

#: How far the trainer's ratio may be from 1 before any update.
TOLERANCE = 1e-3

#: How far a recomputed log-probability may be from the engine's, in nats.
RECOMPUTED = 1e-4

WEATHER: Json = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
STRICT: Json = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
NAMED: Json = {"type": "function", "function": {"name": "weather"}}
SCHEMA: Json = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}

LEAST: dict[str, Json] = {
    CHAT: {"messages": [{"role": "user", "content": "Grüezi!"}], "max_tokens": 24},
    TEXT: {"prompt": "Once upon a", "max_tokens": 24},
    RESPONSES: {"input": "Hi.", "max_output_tokens": 24},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 24},
}

#: Requests whose replies are trained on.
ON_POLICY: dict[str, tuple[str, Json]] = {
    "plain": (CHAT, {}),
    "cold": (CHAT, {"temperature": 0.3}),
    "cool": (CHAT, {"temperature": 0.7, "n": 3}),
    "hot": (CHAT, {"temperature": 1.5, "logprobs": True, "top_logprobs": 3}),
    "neutral": (
        CHAT,
        {"top_p": 1, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1, "logit_bias": {}, "min_tokens": 0},
    ),
    "stopped": (CHAT, {"stop": ["a", "e", "<"], "stop_token_ids": [200, 201], "n": 2}),
    "tools": (CHAT, {"tools": [WEATHER], "n": 2}),
    "tools, none": (CHAT, {"tools": [STRICT], "tool_choice": "none", "temperature": 0.7}),
    "ids": (CHAT, {"return_token_ids": True, "logprobs": True}),
    "text format": (CHAT, {"response_format": {"type": "text"}}),
    "long": (CHAT, {"messages": [{"role": "user", "content": "once upon a time " * 40}], "temperature": 0.7}),
    "turns": (CHAT, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2}),
    "text": (TEXT, {"n": 2}),
    "text, cool": (TEXT, {"temperature": 0.7, "logprobs": 2}),
    "prompts": (TEXT, {"prompt": ["One", "Two", "Three"], "n": 2, "temperature": 1.5}),
    "ids of prompts": (TEXT, {"prompt": [[70, 71, 72], [73]]}),
    "prompt logprobs": (TEXT, {"prompt_logprobs": 0}),
    "echo with ids": (TEXT, {"echo": True, "logprobs": 0, "return_token_ids": True, "temperature": 0.7}),
    "response": (RESPONSES, {}),
    "response, cool": (RESPONSES, {"temperature": 0.7, "instructions": "Be kind."}),
    "message": (MESSAGES, {}),
    "message, cool": (MESSAGES, {"temperature": 0.7, "system": "Be kind."}),
}

_FORMAT: Json = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}

#: Requests whose replies a grammar holds: trained on too, as samples of the policy among what that allows.
HELD: dict[str, tuple[str, Json]] = {
    "regex": (CHAT, {"structured_outputs": {"regex": "[a-z]{9}[A-Z]+"}, "temperature": 0.7}),
    "json": (CHAT, {"response_format": {"type": "json_object"}}),
    "schema": (CHAT, {"response_format": _FORMAT, "n": 2, "max_tokens": 60}),
    "schema, stopped": (CHAT, {"response_format": _FORMAT, "stop_token_ids": [200], "temperature": 1.5}),
    "required": (CHAT, {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60}),
    "required, strict": (CHAT, {"tools": [STRICT, WEATHER], "tool_choice": "required", "max_tokens": 90, "n": 3}),
    "named": (CHAT, {"tools": [STRICT], "tool_choice": NAMED, "max_tokens": 90, "temperature": 0.7}),
    "strict": (CHAT, {"tools": [STRICT]}),
    "one call": (CHAT, {"tools": [WEATHER], "parallel_tool_calls": False}),
    "text, regex": (TEXT, {"structured_outputs": {"regex": "[a-z]{9}"}, "prompt": ["One", "Two"]}),
    "response, schema": (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
    "message, forced": (
        MESSAGES,
        {
            "tools": [{"name": "weather", "input_schema": WEATHER["function"]["parameters"]}],
            "tool_choice": {"type": "any"},
        },
    ),
    # What truncation leaves holds a reply as well, and the engine tells it.
    "nucleus": (CHAT, {"top_p": 0.5, "n": 2}),
    "top k": (CHAT, {"top_k": 5, "temperature": 0.7}),
    "min p": (CHAT, {"min_p": 0.8}),
    "qwen's": (CHAT, {"top_p": 0.95, "top_k": 20, "temperature": 0.6, "stop": ["a", "e", "<"], "max_tokens": 90}),
    "text, nucleus": (TEXT, {"top_p": 0.5, "prompt": ["One", "Two"], "n": 2}),
    "response, nucleus": (RESPONSES, {"top_p": 0.5}),
    "message, top k": (MESSAGES, {"top_k": 3}),
    "schema, nucleus": (CHAT, {"response_format": _FORMAT, "top_p": 0.5, "max_tokens": 60}),
}

#: Of them, those whose first token need not be one that the grammar narrows: a call has to begin first.
RARELY_HELD = {"strict", "one call"}


#: Requests whose replies are not, and the reason.
OFF_POLICY: dict[str, tuple[str, Json, str]] = {
    "greedy": (CHAT, {"temperature": 0}, "sampling:temperature=0"),
    "nucleus, client reads": (CHAT, {"top_p": 0.5, "logprobs": True}, "sampling:top_p"),
    "too much left": (CHAT, {"min_p": 1e-9}, "sampling:mask_too_large"),
    "nucleus, penalty": (CHAT, {"top_p": 0.5, "frequency_penalty": 1}, "sampling:top_p"),
    "choice": (CHAT, {"structured_outputs": {"choice": ["yes", "no"]}}, "sampling:structured_outputs"),
    "repetition": (CHAT, {"repetition_penalty": 1.5}, "sampling:repetition_penalty"),
    "presence": (CHAT, {"presence_penalty": 1.5, "temperature": 0.7}, "sampling:presence_penalty"),
    "frequency": (CHAT, {"frequency_penalty": 1.5}, "sampling:frequency_penalty"),
    "bias": (CHAT, {"logit_bias": {"70": 5}}, "sampling:logit_bias"),
    "bad words": (CHAT, {"bad_words": ["a"]}, "sampling:bad_words"),
    "allowed": (CHAT, {"allowed_token_ids": [70, 71, 72]}, "sampling:allowed_token_ids"),
    "at least": (CHAT, {"min_tokens": 8}, "sampling:min_tokens"),
    "never over": (CHAT, {"ignore_eos": True}, "sampling:ignore_eos"),
    "continued": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        "sampling:continue_final_message",
    ),
    "repeating": (
        CHAT,
        {"repetition_detection": {"max_pattern_size": 4, "min_count": 2}},
        "sampling:repetition_detection",
    ),
    # A reply whose first token is its end token has no text, and its reason is `empty`.
    "hidden reasoning": (CHAT, {"include_reasoning": False, "min_tokens": 8}, "no_token_ids"),
    "text, greedy": (TEXT, {"temperature": 0}, "sampling:temperature=0"),
    "echo": (TEXT, {"echo": True}, "no_token_ids"),
    "echo alone": (TEXT, {"echo": True, "max_tokens": 0, "logprobs": 0, "return_token_ids": True}, "no_token_ids"),
    "message, greedy": (MESSAGES, {"temperature": 0}, "sampling:temperature=0"),
}


_MSG_ID = re.compile(r'"id": ?"((?:chatcmpl-|cmpl-|resp_|msg_)[0-9a-v]{40,})"')


class Recorded(NamedTuple):
    """All that was asked: what the ledger has of each msg_id, what the trainer leased, and the trainer's model."""

    kept: dict[str, str]
    dropped: dict[str, str]
    replies: dict[str, list[ExportedReply]]
    leased: list[Sample]
    actor: Actor
    settings: Settings


def _ask(http: httpx.Client, model: str, path: str, body: Json) -> Iterator[str]:
    """Ask for it whole and streamed; the msg_ids."""
    for stream in (False, True):
        reply = http.post(path, json={"model": model, **LEAST[path], **body, "stream": stream})
        assert reply.status_code == 200, reply.text
        found = _MSG_ID.search(reply.text)
        assert found is not None, reply.text
        yield found[1]


@pytest.fixture(scope="module")
def recorded(explorer: Service, ledger: Ledger) -> Recorded:
    """Everything asked, rewarded, committed and leased once."""
    model = explorer.settings.served_model_name
    with httpx.Client(base_url=explorer.url, timeout=60) as http:
        trained_on = ON_POLICY | HELD
        kept = {each: name for name, (path, body) in trained_on.items() for each in _ask(http, model, path, body)}
        dropped = {each: name for name, (path, body, _) in OFF_POLICY.items() for each in _ask(http, model, path, body)}
        heard = http.post("/feedback", json={"msg_ids": [*kept, *dropped], "reward": 1}).raise_for_status()
        assert heard.json()["status"] == "success", heard.text
    committed = commit(explorer.url)
    epoch = ledger.training.take_epoch("a test")
    assert (
        ledger.training.lease(epoch, committed, BatchRules()) == []
    )  # what is marked is set aside, so there are too few
    leased = ledger.training.lease(epoch, ledger.reports.counts()[State.COMMITTED], BatchRules())
    ledger.training.drop(epoch, [sample.id for sample in leased], "seen by a test")
    replies: dict[str, list[ExportedReply]] = {}
    for page in ledger.exports.replies(Selection(tenant="default")):
        for reply in page:
            if reply.msg_id in kept or reply.msg_id in dropped:
                replies.setdefault(reply.msg_id, []).append(reply)
    champion = ledger.versions.champion()
    actor = Actor.load(explorer.settings, champion.path / "actor" if champion.version else champion.path)
    return Recorded(kept, dropped, replies, leased, actor, explorer.settings)


@torch.no_grad()
def ratios(actor: Actor, samples: Sequence[Sample], *, heat: float = 1.0) -> dict[int, torch.Tensor]:
    """exp(log-probability now - as sampled), token by token, of each sample: what a step begins with."""
    batch, found = collate([TokenSequence.alone(sample) for sample in samples]), {}
    for index_B in micro_batches(batch.lengths_B, 4096):
        part = batch.rows(index_B)
        part = replace(part, temperatures_BR=part.temperatures_BR * heat)
        logprobs_BR, _ = actor.score(part)
        for row, at in enumerate(index_B.tolist()):
            found[samples[at].id] = (logprobs_BR - part.sampled_BR).exp()[row][part.mask_BR[row]]
    return found


def test_the_ratio_is_one_before_any_update(recorded: Recorded) -> None:
    accepted, refused = select(recorded.leased, recorded.settings, vocabulary=recorded.actor.vocabulary)
    assert refused == {}
    expected = {reply.id for msg_id in recorded.kept for reply in recorded.replies[msg_id]}
    assert {sample.id for sample in accepted} == expected
    for name, wanted in (("cool", 6), ("prompts", 12), ("message", 2)):
        found = [msg_id for msg_id, case in recorded.kept.items() if case == name]
        assert sum(len(recorded.replies[msg_id]) for msg_id in found) == wanted
    names = {reply.id: name for msg_id, name in recorded.kept.items() for reply in recorded.replies[msg_id]}
    far = {id_: float((ratio - 1).abs().max()) for id_, ratio in ratios(recorded.actor, accepted).items()}
    assert {names[id_]: by for id_, by in far.items() if by > TOLERANCE} == {}


def test_what_was_not_captured_is_recomputed_to_what_the_engine_would_have_told(
    recorded: Recorded, ledger: Ledger
) -> None:
    share = recorded.settings.explorer.model_copy(update={"capture": CaptureSettings(logprobs="share")})
    settings = recorded.settings.model_copy(update={"explorer": share})
    accepted, _ = select(recorded.leased, settings, vocabulary=recorded.actor.vocabulary)
    silent = [msgspec.structs.replace(each, logprobs=np.full_like(each.logprobs, np.nan)) for each in accepted]
    recomputation = Recomputation(settings, ledger, MicroBatch(settings))
    # The learner is the base model; what a later version sampled, others have published it, is read from its folder.
    filled, lost = recomputation.fill(silent, snapshot.load(settings, None), version=0)
    assert lost == {}
    assert all(each.recomputed for each in filled)
    names = {reply.id: name for msg_id, name in recorded.kept.items() for reply in recorded.replies[msg_id]}
    told = {each.id: each.logprobs for each in accepted}
    apart = {names[each.id]: float(np.abs(each.logprobs - told[each.id]).max()) for each in filled}
    assert apart.keys() == (ON_POLICY | HELD).keys()
    assert {name: by for name, by in apart.items() if by > RECOMPUTED} == {}


def test_without_its_grammar_a_reply_that_was_held_would_not_match(recorded: Recorded) -> None:
    names = {reply.id: name for msg_id, name in recorded.kept.items() for reply in recorded.replies[msg_id]}
    held = [sample for sample in recorded.leased if names[sample.id] in HELD]
    assert {names[sample.id] for sample in held if sample.grammar is not None} == HELD.keys()
    free = [sample for sample in recorded.leased if names[sample.id] in ON_POLICY]
    assert [names[sample.id] for sample in free if sample.grammar is not None] == []
    found = ratios(recorded.actor, held)  # nobody has rebuilt the grammars of these
    matches = {names[id_] for id_, ratio in found.items() if float((ratio - 1).abs().max()) <= TOLERANCE}
    assert matches <= RARELY_HELD


@pytest.mark.contract
def test_what_was_sampled_otherwise_is_marked_and_kept(recorded: Recorded) -> None:
    for msg_id, name in recorded.dropped.items():
        reason = OFF_POLICY[name][2]
        for reply in recorded.replies[msg_id]:
            assert (name, reply.state, reply.reason) == (name, "dropped", reason)
            assert reply.reward == 1
            prompt_ids, completion_ids, logprobs = reply.numbers
            if reason.startswith("sampling:"):
                assert len(prompt_ids) > 0
                assert len(completion_ids) == len(logprobs) > 0


def _rows(path: Path) -> dict[str, Json]:
    # Not splitlines: the replies are made of all characters.
    return {row["msg_id"]: row for row in map(json.loads, path.read_text().strip().split("\n"))}


def test_what_is_marked_can_be_learnt_from_otherwise(recorded: Recorded, ledger: Ledger, tmp_path: Path) -> None:
    """Supervised fine-tuning takes the rewarded answer to a chat, however it was sampled."""
    everything = Selection(tenant="default")
    export(ledger, ExportRequest(Format.SFT, everything, min_reward=1.0), tmp_path / "sft.jsonl")
    export(ledger, ExportRequest(Format.EXPERIENCES, everything), tmp_path / "all.jsonl")
    examples, written = _rows(tmp_path / "sft.jsonl"), _rows(tmp_path / "all.jsonl")
    for msg_id, name in recorded.dropped.items():
        path, _, reason = OFF_POLICY[name]
        assert written[msg_id]["reason"] == reason
        assert len(written[msg_id]["completion_ids"]) == len(written[msg_id]["logprobs"])
        speaks = any(reply.text or reply.tool_calls for reply in recorded.replies[msg_id])
        assert (msg_id in examples) == (path in {CHAT, MESSAGES} and speaks), name
