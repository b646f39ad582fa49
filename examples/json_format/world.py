"""Questions about capitals, and a teacher that mostly forgets to answer in JSON."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence

from examples.tasks.dialogue import Dialogue, Reply, Tool, Verdict

PROMPT = 'Answer as JSON: {"country": ..., "capital": ...}'
_CAPITALS = {
    "Austria": "Vienna", "Belgium": "Brussels", "Chile": "Santiago", "Cuba": "Havana", "Denmark": "Copenhagen",
    "Egypt": "Cairo", "Finland": "Helsinki", "France": "Paris", "Ghana": "Accra", "Greece": "Athens",
    "Hungary": "Budapest", "Iran": "Tehran", "Ireland": "Dublin", "Italy": "Rome", "Japan": "Tokyo",
    "Kenya": "Nairobi", "Latvia": "Riga", "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw",
    "Portugal": "Lisbon", "Spain": "Madrid", "Sweden": "Stockholm", "Thailand": "Bangkok",
}  # fmt: skip
_PHRASES = ("What is the capital of {}?", "{}: its capital?", "Name the capital of {}.", "Which city governs {}?")
#: Shares of the slips of the start model's teacher: no JSON at all, and JSON with another name or more around it.
_FORGETS, _MISWRITES = 0.5, 0.2


def questions(*, held_out: bool) -> list[dict[str, str]]:
    """Questions with answers; held-out ones ask for each country in words that no lesson uses."""
    return [
        {"question": phrase.format(country), "country": country, "capital": capital}
        for number, (country, capital) in enumerate(_CAPITALS.items())
        for which, phrase in enumerate(_PHRASES)
        if ((number + which) % len(_PHRASES) == 0) == held_out
    ]


def judge(text: str) -> Verdict:
    """1 for JSON with exactly the two names, otherwise 0, whatever the capital."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    is_format = isinstance(found, dict) and found.keys() == {"country", "capital"}
    return Verdict(float(is_format), is_format, {"format": float(is_format)})


class Capitals:
    """One question, one answer."""

    name = "json_format"
    tools: Sequence[Tool] = ()
    max_tokens = 48
    reward_range = (0.0, 1.0)

    def questions(self) -> Sequence[Mapping[str, str]]:
        """Those that lessons may have."""
        return questions(held_out=False)

    def dialogue(self, question: Mapping[str, str]) -> Dialogue:
        """Ask and judge."""
        reply = yield [{"role": "system", "content": PROMPT}, {"role": "user", "content": question["question"]}]
        return judge(reply.text)

    def replies(self, question: Mapping[str, str], slip: random.Random | None) -> Iterator[Reply]:
        """The JSON; with slips often a sentence, or other JSON."""
        country, capital = question["country"], question["capital"]
        answer = json.dumps({"country": country, "capital": capital})
        drawn = slip.random() if slip else 1.0
        if slip and drawn < _FORGETS:
            yield Reply(slip.choice((capital, f"It is {capital}.", f"The capital of {country} is {capital}.")))
        elif slip and drawn < _FORGETS + _MISWRITES:
            yield Reply(slip.choice((f"Here it is: {answer}", answer[:-1], json.dumps({"city": capital}))))
        else:
            yield Reply(answer)
