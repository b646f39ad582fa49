"""Records as they may be written: texts, names and token ids."""

import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from tests.doubles.spelling import write_tokenizer
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import REDACTED, Exchange, Experience, Feedback, Grammar, Kind, pack_ids, pack_logprobs
from tuneloop.shared.privacy.detection import Detector
from tuneloop.shared.privacy.redactor import Redactor, pseudonym
from tuneloop.shared.privacy.vocabulary import Spelling, Vocabulary
from tuneloop.shared.settings.feedback import PrivacySettings

_Record = TypeVar("_Record", Exchange, Feedback)

KEY = b"k" * 32
MAIL = "ann@example.org"


@pytest.fixture
def bytes_as_tokens(tmp_path: Path) -> Vocabulary:
    write_tokenizer(tmp_path)
    vocabulary = Vocabulary.load(tmp_path)
    assert vocabulary is not None
    return vocabulary


def redactor(vocabulary: Vocabulary | None = None, analyzer: Any = None, **privacy: Any) -> Redactor:
    settings = PrivacySettings.model_validate({"redact": ["email"]} | privacy)
    return Redactor(Detector(settings, analyzer=analyzer), key=KEY, vocabulary=vocabulary)


def exchange(prompt: str, reply: str, **but: Any) -> Exchange:
    said = Experience(
        choice=0,
        prompt_ids=pack_ids(list(prompt.encode())),
        completion_ids=pack_ids(list(reply.encode())),
        logprobs=pack_logprobs([-0.5] * len(reply.encode())),
        version_min=0,
        version_max=0,
        temperature=1.0,
        finish_reason="stop",
        text=reply,
    )
    values: dict[str, Any] = {
        "msg_id": "m",
        "tenant": "t",
        "endpoint": "/v1/chat/completions",
        "request": json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode(),
        "received_at": 0.0,
        "latency_s": 0.0,
        "experiences": (said,),
    }
    return Exchange(**(values | but))


def written(record: _Record) -> _Record:
    [found] = redactor().records([record])
    assert isinstance(found, type(record))
    return found


def test_what_holds_nothing_is_left_as_it_is(bytes_as_tokens: Vocabulary) -> None:
    given = exchange("hello", "fine", request=b'{ "messages" : [] }')
    assert redactor(bytes_as_tokens).exchange(given) is given


def test_a_value_found_in_the_prompt_is_replaced_in_the_reply(bytes_as_tokens: Vocabulary) -> None:
    hides = redactor(bytes_as_tokens, redact=[], patterns={"code": r"code (\w+)"})
    clean = hides.exchange(exchange("my code XYZ123 is", "it is code XYZ123, or \u00e9"))
    assert clean.experiences[0].text == "it is [REDACTED:code], or \u00e9"


def test_thousands_of_values_are_replaced_in_no_time() -> None:
    """Each text of them would be looked through for each value: this took hours."""
    mails = [f"person{number}@example.org" for number in range(20_000)]
    said = replace(
        exchange("a", "b"), request=json.dumps({"messages": mails, "other": "x person7@example.org"}).encode()
    )
    began = time.process_time()
    found = written(said)
    assert time.process_time() - began < 20
    assert isinstance(found, Exchange)
    assert b"person" not in found.request
    assert b"[REDACTED:too_much]" in found.request


def test_ids_of_text_that_is_no_ascii_keep_their_places(bytes_as_tokens: Vocabulary) -> None:
    [said] = redactor(bytes_as_tokens).exchange(exchange("\u00e9\u00e9", f"\u00fcber {MAIL} \u00e9")).experiences
    ids = np.frombuffer(said.completion_ids, "<i4").tolist()
    assert bytes(each for each in ids if each != REDACTED).decode() == "\u00fcber  \u00e9"
    assert ids.count(REDACTED) == len(MAIL)
    assert np.frombuffer(said.logprobs, "<f4").tolist().count(0.0) == len(MAIL)


def test_a_token_that_lies_across_the_border_goes_too() -> None:
    spelling = Spelling([b"to ", b": an", b"n@x", b".or", b"g, b", b"ye"])
    assert spelling.text[5:14] == "ann@x.org"
    assert list(spelling.tokens(5, 14)) == [1, 2, 3, 4]


def test_a_prompt_that_is_redacted_makes_the_reply_no_sample(bytes_as_tokens: Vocabulary) -> None:
    [said] = redactor(bytes_as_tokens).exchange(exchange(f"I am {MAIL}", "fine")).experiences
    assert said.unsampled == "redacted"
    assert said.drop_reason is None
    assert REDACTED in np.frombuffer(said.prompt_ids, "<i4")
    assert REDACTED not in np.frombuffer(said.completion_ids, "<i4")


def test_metadata_does_not_change_whether_a_reply_is_a_sample(bytes_as_tokens: Vocabulary) -> None:
    body = {"messages": [], "metadata": {"mail": MAIL}, "user": MAIL}
    clean = redactor(bytes_as_tokens).exchange(exchange("hello", "fine", request=json.dumps(body).encode(), user=MAIL))
    assert json.loads(clean.request)["metadata"] == {"mail": "[REDACTED:email]"}
    assert clean.user == pseudonym(MAIL, KEY)
    assert clean.experiences[0].unsampled is None


#: A key, and a prompt in which no pattern tells it: what stands before it makes it a part of a word.
SECRET = "sk-abcdefghijklmnop1234"
LINK = f"https://example.org/?k%3D{SECRET}"
NAMED = json.dumps({"messages": [{"role": "user", "content": LINK}], "metadata": {"key": SECRET}}).encode()


def test_the_ids_of_what_was_found_in_metadata_go_from_the_prompt_and_the_reply(bytes_as_tokens: Vocabulary) -> None:
    clean = redactor(bytes_as_tokens, redact=["api_key"]).exchange(exchange(LINK, f"x{SECRET}", request=NAMED))
    [said] = clean.experiences
    assert SECRET.encode() not in clean.request
    for packed in (said.prompt_ids, said.completion_ids):
        assert np.frombuffer(packed, "<i4").tolist().count(REDACTED) == len(SECRET)
    assert (said.unsampled, said.text) == ("redacted", "x[REDACTED:api_key]")


def test_ids_that_nobody_can_spell_are_dropped_for_what_was_found_in_metadata() -> None:
    [said] = redactor(redact=["api_key"]).exchange(exchange(LINK, "fine", request=NAMED)).experiences
    assert (said.prompt_ids, said.completion_ids, said.drop_reason) == (b"", b"", "redacted")


CARD = 4242424242424242


def redacted_request(body: dict[str, Any], **privacy: Any) -> Any:
    said = exchange("a", "b", request=json.dumps(body).encode())
    return json.loads(redactor(**privacy).exchange(said).request)


def test_a_number_is_redacted_as_a_text_is() -> None:
    used = {"type": "tool_use", "input": {"card": CARD, "same": float(CARD), "year": 2024, "part": 0.4242424242424242}}
    found = redacted_request({"messages": [used], "stream": True, "seed": None}, redact=["credit_card"])
    assert found["messages"][0]["input"] == {
        "card": "[REDACTED:credit_card]",
        "same": "[REDACTED:credit_card]",
        "year": 2024,
        "part": 0.4242424242424242,
    }
    assert (found["stream"], found["seed"]) == (True, None)


OUR_NAME = "resp_" + "0123456789" * 4


def test_only_names_of_ours_are_kept_that_a_request_goes_on_from() -> None:
    digits = {"redact": ["email"], "patterns": {"digits": r"\d{10,}"}}
    for name in (OUR_NAME, OUR_NAME.replace("resp_", "chatcmpl-"), f"{OUR_NAME}:1"):
        body = {"previous_response_id": name, "input": MAIL}
        assert redacted_request(body, **digits) == {"previous_response_id": name, "input": "[REDACTED:email]"}
    for name in (MAIL, f"{OUR_NAME} {MAIL}"):
        found = redacted_request({"previous_response_id": name, "metadata": {"previous_response_id": MAIL}}, **digits)
        assert MAIL not in json.dumps(found)
    assert MAIL not in json.dumps(redacted_request({"input": [{"previous_response_id": {"to": MAIL}}]}))


def test_names_are_the_same_for_the_same_name_and_key_only() -> None:
    hides = redactor()
    assert hides.name(MAIL) == hides.name(MAIL) == pseudonym(MAIL, KEY) != hides.name("bob@example.org")
    assert pseudonym(MAIL, b"x" * 32) != pseudonym(MAIL, KEY)
    assert hides.name("ann") == "ann"


def test_a_grammar_that_holds_a_secret_is_not_kept(bytes_as_tokens: Vocabulary) -> None:
    given = exchange("hello", "fine")
    held = exchange("hello", "fine").experiences[0]
    held = replace(held, grammar=Grammar(kind="regex", spec=MAIL))
    [said] = redactor(bytes_as_tokens).exchange(replace(given, experiences=(held,))).experiences
    assert (said.grammar, said.unsampled) == (None, "redacted")


def test_another_models_tokenizer_is_noticed() -> None:
    wrong = Vocabulary([b"?"] * 256)
    [said] = redactor(wrong).exchange(exchange("hello", f"to {MAIL}")).experiences
    assert (said.prompt_ids, said.completion_ids, said.logprobs, said.drop_reason) == (b"", b"", b"", "redacted")


def test_ids_are_redacted_that_no_text_tells(bytes_as_tokens: Vocabulary) -> None:
    thinking = exchange("hello", f"hm {MAIL} fine")
    [said] = thinking.experiences
    thinking = replace(thinking, experiences=(replace(said, text="fine"),))
    [said] = redactor(bytes_as_tokens).exchange(thinking).experiences
    assert np.frombuffer(said.completion_ids, "<i4").tolist().count(REDACTED) == len(MAIL)


def feedback(**but: Any) -> Feedback:
    values: dict[str, Any] = {"event_id": "e", "call_id": "c", "tenant": "t", "msg_id": "m", "choice": None}
    return Feedback(**(values | {"received_at": 0.0, "kind": Kind.COMMENT} | but))


def test_feedback_is_redacted() -> None:
    clean = written(feedback(text=f"ask {MAIL}", source=MAIL, metric=MAIL))
    assert (clean.text, clean.source, clean.metric) == (
        "ask [REDACTED:email]",
        pseudonym(MAIL, KEY),
        "[REDACTED:email]",
    )


def test_many_events_that_say_the_same_are_each_redacted_and_counted() -> None:
    counted: list[str] = []
    redacts = Redactor(Detector(PrivacySettings(redact=("email",))), key=KEY, count=counted.append)
    said = [feedback(event_id=str(number), text=f"ask {MAIL}", source=("ann", MAIL)[number % 2]) for number in range(4)]
    found = [each for each in redacts.records(said) if isinstance(each, Feedback)]
    assert [(each.event_id, each.text) for each in found] == [(str(n), "ask [REDACTED:email]") for n in range(4)]
    assert [each.source for each in found] == ["ann", pseudonym(MAIL, KEY)] * 2
    assert counted == ["email"] * 4


def test_an_edited_answer_stays_a_message() -> None:
    answer = {
        "role": "assistant",
        "content": "Ask \u00fc",
        "tool_calls": [{"function": {"arguments": json.dumps([MAIL])}}],
    }
    clean = written(feedback(kind=Kind.DEMONSTRATION, text=json.dumps(answer)))
    assert clean.text is not None
    assert json.loads(clean.text)["tool_calls"][0]["function"]["arguments"] == '["[REDACTED:email]"]'


@pytest.mark.parametrize("bad", ["(", "a" * 1001, "x*", "(?P<n>a)(?P<n"])
def test_a_pattern_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(ValidationError, match="mine"):
        PrivacySettings(patterns={"mine": bad})


# Presidio. Its wheel brings no model, so an analyzer of the same form stands for it.


class _Engine:
    def get_supported_entities(self, language: str) -> list[str]:
        return ["PERSON"]

    def analyze(self, text: str, *, entities: list[str], language: str) -> list[SimpleNamespace]:
        at = text.find("Ann Smith")
        return [SimpleNamespace(start=at, end=at + 9, entity_type="PERSON")] if at >= 0 else []


@pytest.fixture
def with_presidio(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("presidio_analyzer")
    module.AnalyzerEngine = _Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "presidio_analyzer", module)


@pytest.mark.usefixtures("with_presidio")
def test_what_presidio_finds_is_redacted() -> None:
    hides = redactor(redact=[], presidio=["PERSON"])
    assert hides.slow
    [said] = hides.exchange(exchange("I am Ann Smith", "Hello Ann Smith!")).experiences
    assert said.text == "Hello [REDACTED:person]!"


def test_without_presidio_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    with pytest.raises(EnvironmentRefused, match=r"presidio-analyzer is not installed.*\[presidio\]"):
        redactor(presidio=["PERSON"])


def test_what_presidio_fails_for_is_replaced_whole() -> None:
    def fails(text: str) -> list[tuple[int, int, str]]:
        raise ValueError(text)

    failed: list[str] = []
    detector = Detector(PrivacySettings(redact=()), analyzer=fails, timed_out=failed.append)
    assert [(span.start, span.end) for span in detector.spans("my secret")] == [(0, 9)]
    assert failed == ["presidio"]


# The vocabulary.


def test_pieces_of_sentencepiece_are_spelled(tmp_path: Path) -> None:
    vocab = {"\u2581to": 0, "<0xC3>": 1, "<0xA9>": 2, "x": 3}
    decoder = {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    added = [{"id": 4, "content": "<end>"}]
    described = {"model": {"vocab": vocab}, "decoder": decoder, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    vocabulary = Vocabulary.load(tmp_path)
    assert vocabulary is not None
    assert vocabulary.spell(np.arange(5)) == [b" to", b"\xc3", b"\xa9", b"x", b"<end>"]
    assert vocabulary.spell(np.array([0, REDACTED, 3])) == [b" to", b"", b"x"]
    assert vocabulary.spell(np.array([9])) is None


UNREADABLE = ("", "[]", '{"model": {"vocab": {}}}', '{"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}}')


@pytest.mark.parametrize("content", UNREADABLE)
def test_a_tokenizer_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    assert Vocabulary.load(tmp_path) is None
