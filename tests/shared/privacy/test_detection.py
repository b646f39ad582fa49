"""What the built-in kinds find, and what they leave."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneloop.shared.privacy.detection import FINDERS, Detector, Span
from tuneloop.shared.settings.feedback import BuiltIn, PrivacySettings

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dGVzdA"

FOUND = {
    "email": ["ann.o@ex-am.co.uk", "ann+1@example.org", "jörg@müller.de"],
    "phone": ["+44 20 7946 0958", "(555) 123-4567", "555-123-4567", "030 1234567", "0049 30 1234567"],
    "credit_card": ["4111 1111 1111 1111", "378282246310005", "5500-0000-0000-0004", "3782 822463 10005"],
    "iban": ["DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432", "gb82west12345698765432"],
    "ip_address": ["10.1.2.3", "2001:db8::ff00:42:8329", "fe80:0:0:0:0:0:0:1", "::1"],
    "api_key": ["sk-proj-abcdefgh12345678", "AKIAIOSFODNN7EXAMPLE", "ghp_" + "a1" * 18, "xoxb-1234567890-abc"],
    "jwt": [JWT],
    "private_key": [PEM, PEM.replace("\n", "\\n"), PEM.replace("RSA ", "")],
    "us_ssn": ["078-05-1120", "078 05 1120"],
}

LEFT = {
    "email": ["@ann", "a@b", "pkg@1.2.3", "ann at example.org"],
    "phone": ["2026-11-23", "01-02-2026", "12:30:45", "1234567890123456", "version 1.2.3.4"],
    "credit_card": ["4111 1111 1111 1112", "1234567890123456", "0000 0000 0000 0000", "123"],
    "iban": ["DE88 3704 0044 0532 0130 00", "XX89370400440532013000", "DE89 3704"],
    "ip_address": ["1.2.3.400", "1.2.3", "std::cat", "12:30:45", "1.2.3.4.5"],
    "api_key": ["task-management-of-systems", "sk-learn-compatible-estimators", "sk-short1"],
    "jwt": ["eyJ", "eyJhbGciOiJIUzI1NiJ9", "heyJude.is.a.song"],
    "private_key": ["-----BEGIN PUBLIC KEY-----", "-----BEGIN CERTIFICATE-----"],
    "us_ssn": ["000-05-1120", "078-05-0000", "900-05-1120", "1078-05-1120", "078051120"],
}


def found(kind: str, text: str) -> list[str]:
    return [text[start:end] for start, end in FINDERS[kind](text)]


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, values in FOUND.items() for value in values])
@pytest.mark.parametrize(
    "around",
    [
        *("{}", "it is {}, really", 'said "{}".', "({})\n", "a\n{}\nb", "é{{x: {}}}"),
        *("我的号码是{}。", "私の番号は{}です", "หมายเลข{}ครับ", "전화{}입니다"),
    ],
)
def test_it_is_found_whole_wherever_it_stands(kind: str, value: str, around: str) -> None:
    assert found(kind, around.format(value)) == [value]


def test_an_address_may_be_in_another_script() -> None:
    assert found("email", "write to 张三@例子.公司, or 张三@example.org") == ["张三@例子.公司", "张三@example.org"]


STARTS = (
    *("sk-", "tl-", "sk_live_", "sk_test_", "rk_live_", "ya29.", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
    *("glpat-", "xoxa-", "xoxb-", "xoxp-", "xoxr-", "xoxs-", "npm_", "pypi-", "dop_v1_"),
)
KEYS = [
    *(start + "a1" * 32 for start in STARTS),
    *(start + "A1" * 8 for start in ("AKIA", "ASIA")),
    "AIza" + "a1" * 17 + "b",
    "hf_" + "aB" * 17,
    "SG." + "a1" * 11 + "." + "b2" * 20,
]


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_every_service_are_found(key: str) -> None:
    assert found("api_key", f"it is {key}, really") == [key]


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, values in LEFT.items() for value in values])
def test_what_only_looks_like_it_is_left(kind: str, value: str) -> None:
    assert found(kind, f"it is {value}, really") == []


def test_every_kind_of_the_settings_is_there() -> None:
    assert set(FINDERS) == set(BuiltIn.__args__)  # type: ignore[attr-defined]
    assert set(FOUND) == set(LEFT) == set(FINDERS)


def test_a_card_is_found_among_other_numbers() -> None:
    assert found("credit_card", "4111 1111 1111 1111 123 and 5500-0000-0000-0004 4242424242424242") == [
        "4111 1111 1111 1111",
        "5500-0000-0000-0004",
        "4242424242424242",
    ]


@pytest.mark.parametrize("kind", FOUND)
def test_each_of_several_is_found(kind: str) -> None:
    text = ", ".join(FOUND[kind])
    assert [text[start:end] for start, end in sorted(FINDERS[kind](text))] == FOUND[kind]


def test_an_iban_is_found_after_what_looks_like_the_beginning_of_one() -> None:
    for before in ("AB12 my number is ", "DE89 3704 0044 0532 0130 00 ", "GB82 WEST "):
        assert found("iban", f"{before}GB82WEST12345698765432")[-1] == "GB82WEST12345698765432"


def test_digits_that_are_not_ascii_are_digits() -> None:
    wide = str.maketrans("0123456789", "\uff10\uff11\uff12\uff13\uff14\uff15\uff16\uff17\uff18\uff19")
    for kind, value in (("us_ssn", "078-05-1120"), ("phone", "555-123-4567")):
        assert found(kind, f"it is {value.translate(wide)}") == [value.translate(wide)]


_PIECES = [
    *(each for values in FOUND.values() for each in values),
    *(each for values in LEFT.values() for each in values),
    *(
        "",
        "a",
        "\n",
        "4111",
        "1111 1111 1111",
        "+44",
        "20 7946 0958",
        "ann@",
        "example.org",
        "-----END PRIVATE KEY-----",
    ),
]


@given(st.lists(st.lists(st.sampled_from(_PIECES), max_size=3).map("".join), max_size=12, unique=True))
def test_texts_that_are_searched_together_hold_what_each_holds_alone(texts: list[str]) -> None:
    detector = Detector(PrivacySettings(redact=tuple(FINDERS)))
    assert list(detector.spans_of(texts).items()) == [
        (each, spans) for each in texts if (spans := detector.spans(each))
    ]


def test_a_hundred_thousand_short_texts_take_little_longer_than_a_long_one() -> None:
    detector = Detector(PrivacySettings(redact=tuple(FINDERS)))
    texts = [f"field {number}" for number in range(100_000)]
    began = time.thread_time()
    for each in texts[:2000]:
        detector.spans(each)
    alone = (time.thread_time() - began) * 50
    began = time.thread_time()
    assert detector.spans_of([*texts, "ann@example.org"]) == {"ann@example.org": [Span(0, 15, "email")]}
    assert time.thread_time() - began < alone / 2


def test_a_key_that_was_cut_off_goes_to_the_end() -> None:
    assert found("private_key", f"a {PEM[:40]}") == [PEM[:40]]


EVIL = (
    *("a", "@", "a@", "a.b@c.", "eyJ", "-eyJ", "eyJa.", "-----BEGIN PRIVATE KEY-----", "555-123-4567-", "+1 (((1"),
    *("1 ", "012 ", "4111 ", "0", "DE89 ", "1.2.3.4.", "a:b:", "::1", "SG.aaaaaaaaaaaaaaaaaaa", "sk-", "078-05-1120-"),
)


@pytest.mark.parametrize("kind", FINDERS)
def test_no_text_takes_more_than_linear_time(kind: str) -> None:
    """Ten times the text may not take a hundred times as long: counted in this thread's time, not by the clock."""
    for piece in EVIL:
        times = []
        for size in (20_000, 200_000):
            text = (piece * size)[:size]
            began = time.thread_time()
            list(FINDERS[kind](text))
            times.append(time.thread_time() - began)
        assert times[1] < 50 * max(times[0], 0.002), piece
