"""Tasks that say the same."""

import random
from typing import Any

from tuneloop.runner.tasks.task_set import ImportedTask, deduplicate

WORDS = ["parcel", "invoice", "refund", "order", "monday", "address", "street", "late", "broken", "window", "email"]


def task(name: str, text: str, *before: dict[str, Any]) -> ImportedTask:
    asked = (*before, {"role": "user", "content": text})
    return ImportedTask(task_id=name, question=text, messages=asked)


def left(*texts: str, **but: Any) -> str:
    found = deduplicate([task(str(at), text) for at, text in enumerate(texts)], **but)
    return "".join(each.task_id for each in found.kept)


def likeness(one: str, other: str) -> float:
    """The share of the runs of five characters of two texts that both have."""
    a, b = ({text[at : at + 5] for at in range(len(text) - 4)} for text in (one, other))
    return len(a & b) / len(a | b)


def test_case_and_white_space_make_no_difference() -> None:
    found = deduplicate([task("a", "Where is my parcel?"), task("b", " where  IS my\nparcel? ")], near=None)
    assert [each.task_id for each in found.kept] == ["a"]
    assert (found.exact, found.near) == ({"b": "a"}, {})


def test_nearly_the_same_is_the_same() -> None:
    long = "Please tell me where the parcel is that I have ordered from your shop last week, thank you very much"
    found = deduplicate([task("a", long), task("b", long + "!"), task("c", "Cancel my account, please.")])
    assert [each.task_id for each in found.kept] == ["a", "c"]
    assert found.near == {"b": "a"}
    assert left(long, long + "!", near=None) == "01"


def test_other_numbers_are_another_task() -> None:
    text = "Tom has {} apples and buys {} more at the market in the old town. How many apples does Tom have now?"
    assert likeness(text.format(12, 7), text.format(13, 7)) > 0.8
    assert left(text.format(12, 7), text.format(13, 7), text.format(12, 7) + " ") == "01"


def test_the_prompt_of_a_system_makes_no_questions_alike() -> None:
    system = {"role": "system", "content": "You are the assistant of a shop. " * 50}
    tasks = [task("a", "Where is my parcel?", system), task("b", "Cancel it!", system)]
    assert len(deduplicate(tasks).kept) == 2


def test_languages_without_spaces_are_compared_too() -> None:
    text = "请问我上周在你们商店订购的包裹现在在哪里,什么时候可以送到我家,谢谢"
    assert left(text, text + "!", "取消我的账户") == "02"


def test_what_is_in_another_set_is_left_out() -> None:
    found = deduplicate([task("b", "Where is my parcel?")], against=[task("a", "where is my parcel?")])
    assert (found.kept, found.exact) == ((), {"b": "a"})


def test_hashing_finds_what_comparing_all_pairs_finds() -> None:
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=20)) for _ in range(150)]
    for text in texts[:100]:
        words = text.split()
        words[chance.randrange(20)] = chance.choice(WORDS)
        texts.append(" ".join(words))
    by_pairs: list[str] = []
    for text in texts:
        if all(likeness(text, other) < 0.8 for other in by_pairs):
            by_pairs.append(text)
    assert len(by_pairs) < len(texts) - 30
    kept = [each.question for each in deduplicate([task(str(at), text) for at, text in enumerate(texts)]).kept]
    assert abs(len(kept) - len(by_pairs)) <= 1
