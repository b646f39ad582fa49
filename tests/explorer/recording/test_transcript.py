import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.doubles.engine import pieces, recorded
from tuneloop.explorer.transcript import ChatTranscript, RequestedFields, Sampling, Transcript
from tuneloop.shared.experience import Experience, Grammar, is_captured, pack_ids, pack_logprobs

pytestmark = pytest.mark.contract

ON_POLICY = Sampling(1.0)


def transcript(msg_id: str = "chatcmpl-recorded", **wants: bool) -> Transcript:
    return ChatTranscript(msg_id, RequestedFields(**wants))


def feed(found: Transcript, piece: dict[str, Any]) -> dict[str, Any] | None:
    view = found.feed(json.dumps(piece, separators=(",", ":")).encode())
    return None if view is None else json.loads(view)


def said(name: str) -> Iterator[dict[str, Any]]:
    """The decoded pieces of a recording; a whole reply is one piece."""
    data = recorded(name)
    if name.endswith(".json"):
        yield json.loads(data)
        return
    for event in pieces(data):
        if (text := event.removeprefix(b"data: ").strip()) != b"[DONE]":
            yield json.loads(text)


def heard(name: str, **but: Any) -> Transcript:
    found = transcript(**but)
    for piece in said(name):
        feed(found, piece)
    return found


def experiences(found: Transcript, sampling: Sampling = ON_POLICY, *, mixed: bool = False) -> tuple[Experience, ...]:
    return found.experiences(sampling, versions=(3, 3), mixed=mixed)


def told(name: str, **but: Any) -> list[dict[str, Any]]:
    """What the client gets of a recording."""
    found = transcript(**but)
    return [view for piece in said(name) if (view := feed(found, piece)) is not None]


def merged(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream as one reply, so that it matters what was said and not in which portions."""
    whole: dict[str, Any] = {}
    for piece in stream:
        whole |= {key: value for key, value in piece.items() if key not in {"choices", "created"} and value is not None}
        for choice in piece["choices"]:
            mine = whole.setdefault(("choice", choice["index"]), {"text": "", "arguments": "", "logprobs": []})
            mine["logprobs"] += (choice.pop("logprobs") or {}).get("content") or []
            delta = choice["delta"]
            mine["text"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                mine["arguments"] += call["function"].get("arguments", "")
                mine["name"] = call["function"].get("name") or mine.get("name")
            mine |= {key: value for key, value in choice.items() if key != "delta" and value is not None}
    return whole


def calls_of(found: Experience) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = json.loads(found.tool_calls or b"[]")
    return calls


def unnamed(found: tuple[Experience, ...]) -> list[Experience]:
    """Without the ids of tool calls, which are random."""
    alike = [[call | {"id": ""} for call in calls_of(each)] for each in found]
    return [
        msgspec.structs.replace(each, tool_calls=json.dumps(calls).encode())
        for each, calls in zip(found, alike, strict=True)
    ]


@pytest.mark.parametrize("kind", ["", "_logprobs", "_tools"])
def test_a_whole_and_a_streamed_reply_are_equal_experiences(kind: str) -> None:
    whole, streamed = experiences(heard(f"whole{kind}_captured.json")), experiences(heard(f"stream{kind}_captured.sse"))
    assert unnamed(whole) == unnamed(streamed)
    assert (whole[0].drop_reason, whole[0].unsampled) == (None, None)
    assert len(whole[0].completion_ids) == len(whole[0].logprobs) > 0


def test_an_experience_holds_what_was_sampled() -> None:
    reply = json.loads(recorded("whole_captured.json"))
    (found,) = experiences(heard("whole_captured.json"))
    assert np.frombuffer(found.prompt_ids, "<i4").tolist() == reply["prompt_token_ids"]
    assert np.frombuffer(found.completion_ids, "<i4").tolist() == reply["choices"][0]["token_ids"]
    logprobs = [entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]]
    assert np.frombuffer(found.logprobs, "<f4").tolist() == np.asarray(logprobs, "<f4").tolist()
    assert found.text == reply["choices"][0]["message"]["content"]
    assert (found.finish_reason, found.version_min, found.version_max) == ("length", 3, 3)


@pytest.mark.parametrize("name", ["whole_n2_captured.json", "stream_n2_captured.sse"])
def test_every_choice_is_an_experience(name: str) -> None:
    first, second = experiences(heard(name))
    assert (first.choice, second.choice) == (0, 1)
    assert first.prompt_ids == second.prompt_ids != b""
    assert first.completion_ids != second.completion_ids
    assert (first.drop_reason, second.drop_reason) == (None, None)


@pytest.mark.parametrize("name", ["whole_tools_captured.json", "stream_tools_captured.sse"])
def test_an_experience_holds_the_tool_calls_as_a_message_has_them(name: str) -> None:
    (found,) = experiences(heard(name))
    (call,) = calls_of(found)
    assert call.pop("id").startswith("chatcmpl-tool-")
    assert call == {"type": "function", "function": {"name": "add", "arguments": "false"}}
    assert found.text == ""


def test_a_reply_that_calls_nothing_has_no_tool_calls() -> None:
    (found,) = experiences(heard("whole_captured.json"))
    assert found.tool_calls is None


def test_streamed_calls_are_told_apart_by_their_index() -> None:
    """As OpenAI documents it: what is new comes under the index of its call."""
    found = transcript()
    for index, call_id, name, arguments in [
        (0, "call_a", "add", None),
        (0, None, None, '{"a": 1'),
        (1, "call_b", "half", ""),
        (1, None, None, "{}"),
        (0, None, None, "}"),
    ]:
        call = {"index": index, "id": call_id, "type": call_id and "function"}
        delta = {"tool_calls": [call | {"function": {"name": name, "arguments": arguments}}]}
        feed(found, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    assert calls_of(experiences(found)[0]) == [
        {"id": "call_a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "call_b", "type": "function", "function": {"name": "half", "arguments": "{}"}},
    ]


@pytest.mark.parametrize("count", range(14))
def test_a_reply_cut_off_is_marked(count: int) -> None:
    found = transcript()
    for piece, _ in zip(said("stream_nousage_captured.sse"), range(count), strict=False):
        feed(found, piece)
    assert all(each.drop_reason == ("cut_off" if count < 13 else None) for each in experiences(found))
    assert found.complete == (count >= 13)


def test_a_reply_with_an_error_in_it_is_cut_off() -> None:
    found = heard("stream_captured.sse")
    assert feed(found, {"error": {"message": "no"}}) == {"error": {"message": "no"}}
    assert experiences(found)[0].drop_reason == "cut_off"


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_reply_that_the_engine_gave_up_is_cut_off(reason: str) -> None:
    (piece,) = said("whole_captured.json")
    piece["choices"][0]["finish_reason"] = reason
    found = transcript()
    feed(found, piece)
    assert experiences(found)[0].drop_reason == "cut_off"


def test_a_reply_of_two_versions_is_marked() -> None:
    (found,) = experiences(heard("whole_captured.json"), Sampling(0.5, "sampling:top_p"), mixed=True)
    assert (found.drop_reason, found.unsampled) == (None, "mixed_version")


def test_how_it_was_sampled_is_marked() -> None:
    (found,) = experiences(heard("whole_captured.json"), Sampling(0.5, "sampling:top_p"))
    assert (found.drop_reason, found.unsampled, found.temperature) == (None, "sampling:top_p", 0.5)


TRUNCATED = Sampling(0.5, "sampling:top_p", truncated=True)


@pytest.mark.parametrize(
    ("counts", "ids", "unsampled"),
    [
        ([2] + [1] * 11, 13, None),
        ([2] + [0] + [1] * 10, 12, "sampling:mask_too_large"),
        ([2] + [1] * 11, 12, "sampling:top_p"),
        ([1] * 11, 11, "sampling:top_p"),
        ([1] * 13, 13, "sampling:top_p"),
        ([], 0, "sampling:top_p"),
    ],
)
def test_what_truncation_left_is_kept_if_the_engine_told_all_of_it(
    counts: list[int], ids: int, unsampled: str | None
) -> None:
    (piece,) = said("whole_captured.json")
    kept = {"kept": pack_ids(counts), "kept_ids": pack_ids(range(ids))}
    logprobs = {"content": None, "packed": pack_logprobs([-1.0] * 12), **kept}
    piece["choices"][0]["logprobs"] = {
        name: b64encode(each).decode() if isinstance(each, bytes) else each for name, each in logprobs.items()
    }
    found = transcript()
    assert feed(found, piece)["choices"][0]["logprobs"] is None  # type: ignore[index]
    mask = Grammar(kind="tokens", spec="", sets=kept["kept"] + kept["kept_ids"])
    (one,) = experiences(found, TRUNCATED)
    assert (one.unsampled, one.grammar) == (unsampled, mask if unsampled is None else None)
    (other,) = experiences(found, TRUNCATED, mixed=True)
    assert (other.unsampled, other.grammar) == ("mixed_version", None)


def test_what_nothing_can_learn_from_is_dropped_however_it_was_sampled() -> None:
    (found,) = experiences(heard("whole_captured.json"), Sampling(0.5, "sampling:top_p", "opt_out"))
    assert (found.drop_reason, found.unsampled) == ("opt_out", "sampling:top_p")


def changed(**but: Any) -> Transcript:
    """A whole reply whose choice differs."""
    (piece,) = said("whole_captured.json")
    piece |= {key: value for key, value in but.items() if key == "prompt_token_ids"}
    piece["choices"][0] |= {key: value for key, value in but.items() if key != "prompt_token_ids"}
    found = transcript()
    feed(found, piece)
    return found


def entries(*logprobs: object) -> dict[str, Any]:
    return {"content": [{"token": "x", "logprob": each} for each in logprobs]}


@pytest.mark.parametrize(
    ("but", "reason"),
    [
        ({"token_ids": None}, "no_token_ids"),
        ({"token_ids": None, "logprobs": None}, "no_token_ids"),
        ({"token_ids": [1, 2], "logprobs": entries(-1.0)}, "no_token_ids"),
        ({"token_ids": [1 << 31], "logprobs": entries(-1.0)}, "no_token_ids"),
        ({"token_ids": [-1], "logprobs": entries(-1.0)}, "no_token_ids"),
        ({"token_ids": ["1"], "logprobs": entries(-1.0)}, "no_token_ids"),
        ({"token_ids": [1], "logprobs": entries(None)}, "no_token_ids"),
        ({"prompt_token_ids": None}, "no_token_ids"),
        ({"prompt_token_ids": [1 << 40]}, "no_token_ids"),
        ({"token_ids": [], "logprobs": entries(), "message": {"content": ""}}, "empty"),
        ({"token_ids": [], "logprobs": None, "message": {"content": None}}, "empty"),
        ({"token_ids": [1], "logprobs": entries(-1e40)}, "logprobs_not_finite"),
        ({"token_ids": [1], "logprobs": entries(0.5)}, "logprobs_not_finite"),
    ],
)
def test_what_cannot_be_trained_on_says_why(but: dict[str, Any], reason: str) -> None:
    (found,) = experiences(changed(**but))
    assert found.drop_reason == reason
    assert len(found.completion_ids) == len(found.logprobs)


def test_a_prompt_id_beyond_all_numbers_costs_nobody_the_reply() -> None:
    (piece,) = said("whole_captured.json")
    written = json.dumps(piece | {"prompt_token_ids": "?"}, separators=(",", ":")).encode()
    found = transcript()
    assert found.feed(written.replace(b'"?"', b"[1e999]"))
    assert [each.drop_reason for each in experiences(found)] == ["no_token_ids"]


@pytest.mark.parametrize("kind", ["", "_tools"])
def test_a_client_that_asked_for_nothing_gets_the_plain_reply(kind: str) -> None:
    (view,), (plain,) = told(f"whole{kind}_captured.json"), said(f"whole{kind}_plain.json")
    for reply in (view, plain):
        reply.pop("created")
        for call in reply["choices"][0]["message"].get("tool_calls", ()):
            call.pop("id")  # random
    assert view == plain


def test_a_client_that_asked_for_logprobs_gets_those_only() -> None:
    (view,) = told("whole_logprobs_captured.json", logprobs=True)
    (plain,) = said("whole_logprobs.json")
    assert view | {"created": 0} == plain | {"created": 0}


def test_a_client_that_asked_for_token_ids_gets_those_only() -> None:
    (view,), (plain,) = told("whole_captured.json", token_ids=True), said("whole_ids.json")
    assert view | {"created": 0} == plain | {"created": 0}


def test_a_client_that_asked_for_both_gets_everything() -> None:
    both = told("whole_captured.json", logprobs=True, token_ids=True)
    assert both == list(said("whole_captured.json"))


@pytest.mark.parametrize("kind", ["", "_nousage", "_tools"])
def test_a_streamed_reply_is_the_plain_one_piece_by_piece(kind: str) -> None:
    view, plain = told(f"stream{kind}_captured.sse"), list(said(f"stream{kind}_plain.sse"))
    assert [set(piece) for piece in view] == [set(piece) for piece in plain]
    if kind != "_tools":
        assert [piece | {"created": 0} for piece in view] == [piece | {"created": 0} for piece in plain]
    assert merged(view) == merged(plain)


def test_a_streamed_reply_with_logprobs_keeps_its_empty_pieces() -> None:
    view, plain = told("stream_logprobs_captured.sse", logprobs=True), list(said("stream_logprobs.sse"))
    assert len(view) == len(list(said("stream_logprobs_captured.sse")))
    assert merged(view) == merged(plain)


def test_the_id_of_a_reply_is_ours() -> None:
    assert all(piece["id"] == "chatcmpl-ours" for piece in told("stream_captured.sse", msg_id="chatcmpl-ours"))


@pytest.mark.parametrize("name", ["whole_ids.json", "stream_nousage_ids.sse"])
def test_log_probabilities_that_were_not_asked_for_are_not_captured(name: str) -> None:
    found = transcript()
    found.captured = False
    for piece in said(name):
        feed(found, piece)
    [experience] = experiences(found)
    told = np.frombuffer(experience.logprobs, "<f4")
    assert len(told) == len(experience.completion_ids) // 4 > 0
    assert not is_captured(told)
    assert experience.drop_reason is None


@pytest.mark.parametrize("name", ["whole_ids.json", "stream_nousage_ids.sse"])
def test_log_probabilities_that_were_asked_for_and_did_not_come_make_a_reply_unreadable(name: str) -> None:
    [experience] = experiences(heard(name))
    assert experience.drop_reason == "no_token_ids"
