"""A mailbox in SQLite, made here, four tools that search it, and questions that one of them answers.

The agent should call the right tool with the right argument, then name the numbers of the mails found.
"""

import itertools
import json
import random
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from examples.tasks.dialogue import Dialogue, Message, Reply, Tool, Verdict, call_of
from tuneloop.runner import Reply as Judged
from tuneloop.runner import ToolCall
from tuneloop.runner.rewards.components import tool_reward

PROMPT = "Search the mailbox, then list the numbers of the mails."
#: Calls of the model in one run.
MOST_CALLS = 3
MAILS = 60

_SENDERS = (
    "Ana", "Ben", "Cora", "Dan", "Eva", "Finn", "Gina", "Hugo",
    "Iris", "Jon", "Kim", "Leo", "Mia", "Nils", "Olga", "Paul",
)  # fmt: skip
_TOPICS = (
    "invoice", "budget", "holiday", "contract", "meeting", "report", "travel", "salary",
    "server", "lunch", "training", "survey", "garden", "concert", "repair", "election",
)  # fmt: skip
_DAYS = tuple(f"{month}-{day:02}" for month in ("05", "06", "07", "08") for day in (3, 9, 14, 21))
_FOLDERS = (
    "inbox", "sent", "work", "family", "bills", "drafts", "spam", "archive",
    "news", "sport", "music", "friends", "school", "health", "shop", "bank",
)  # fmt: skip
#: By tool: its column, the values that there are, and what is said.
SEARCHES: Mapping[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "search_sender": ("sender", _SENDERS, (
        "What did {} write?", "Mails from {}, please.", "Who wrote as {}?", "Did {} answer?", "I need what {} sent.",
    )),
    "search_topic": ("topic", _TOPICS, (
        "Anything about {}?", "Find the {} mails.", "What is it about the {}?", "Who mentions the {}?", "All on {}.",
    )),
    "search_day": ("day", _DAYS, (
        "What came on {}?", "Mails of {}, please.", "What was there on {}?", "Show me {}.", "The post of {}.",
    )),
    "search_folder": ("folder", _FOLDERS, (
        "What lies in {}?", "Look into {}.", "List the {} folder.", "Open {}.", "What have I put into {}?",
    )),
}  # fmt: skip
TOOLS: Sequence[Tool] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Search mails by {column}.",
            "parameters": {"type": "object", "properties": {column: {"type": "string"}}, "required": [column]},
        },
    }
    for name, (column, _, _) in SEARCHES.items()
)
REWARD = tool_reward(*SEARCHES)
#: Shares of the slips of the start model's teacher.
_WRONG_TOOL, _INVENTED, _WRONG_ARGUMENT = 0.5, 0.12, 0.24


@cache
def mailbox() -> sqlite3.Connection:
    """The mails, the same ones whenever they are made."""
    chance = random.Random("mailbox")
    mails = sqlite3.connect(":memory:", check_same_thread=False)
    mails.execute("CREATE TABLE mails (id INTEGER PRIMARY KEY, sender TEXT, topic TEXT, day TEXT, folder TEXT)")
    columns = [values for _, values, _ in SEARCHES.values()]
    rows = [[chance.choice(values) for values in columns] for _ in range(MAILS)]
    mails.executemany("INSERT INTO mails (sender, topic, day, folder) VALUES (?, ?, ?, ?)", rows)
    return mails


def search(tool: str, arguments: Mapping[str, Any] | None) -> str:
    """The tool's result: the numbers of the first three mails found, or an error."""
    if tool not in SEARCHES:
        return f"error: there is no tool {tool}"
    column = SEARCHES[tool][0]
    value = (arguments or {}).get(column)
    if not isinstance(value, str):
        return f"error: {tool} needs {column}"
    found = mailbox().execute(f"SELECT id FROM mails WHERE {column} = ? ORDER BY id LIMIT 3", (value,)).fetchall()
    return " ".join(str(number) for (number,) in found) or "error: nothing was found"


def questions(*, held_out: bool) -> list[dict[str, Any]]:
    """The questions for training, or the held-out quarter."""
    every = [
        {"question": said.format(value), "tool": tool, "arguments": {column: value}}
        for tool, (column, values, phrases) in SEARCHES.items()
        for said, value in itertools.product(phrases, values)
        if not search(tool, {column: value}).startswith("error")
    ]
    random.Random("held out").shuffle(every)
    quarter = len(every) // 4
    return every[:quarter] if held_out else every[quarter:]


def judge(task: Mapping[str, Any], text: str, calls: Sequence[ToolCall]) -> Verdict:
    """The run's reward by its first tool call, and the share of mails that the answer names."""
    expected = ToolCall(task["tool"], task["arguments"])
    judged = Judged.of_trajectory(_messages(calls[:1], text), tools=tuple(SEARCHES), expected_calls=(expected,))
    score = REWARD(judged)
    total = score.total if calls else score.total + REWARD_WITHOUT_A_CALL
    wanted = search(task["tool"], task["arguments"]).split()
    named = set(re.findall("[0-9]+", text))
    tool, arguments = score.values["correct_tool"] or 0.0, score.values["correct_args"] or 0.0
    metrics = {"tools": tool, "arguments": arguments, "recall": sum(each in named for each in wanted) / len(wanted)}
    return Verdict(total, tool == arguments == 1.0, metrics)


#: An answer without a call is as bad as an unknown tool.
REWARD_WITHOUT_A_CALL = -2.0


def _messages(calls: Sequence[ToolCall], text: str) -> list[Message]:
    said: list[Message] = []
    for call in calls:
        function = {"name": call.name, "arguments": None if call.arguments is None else json.dumps(call.arguments)}
        said.append({"role": "assistant", "content": None, "tool_calls": [{"function": function}]})
        said.append({"role": "tool", "content": search(call.name, call.arguments)})
    return [*said, {"role": "assistant", "content": text}]


class Mailbox:
    """The questions as a task for a model in this process."""

    name = "email_search"
    tools = TOOLS
    max_tokens = 48
    reward_range = (-2.0, 2.5)

    def questions(self) -> Sequence[dict[str, Any]]:
        """The questions for training."""
        return questions(held_out=False)

    def dialogue(self, question: Mapping[str, Any]) -> Dialogue:
        """What the agent of the example does."""
        messages: list[Message] = [
            {"role": "system", "content": PROMPT},
            {"role": "user", "content": question["question"]},
        ]
        made: list[ToolCall] = []
        for _ in range(MOST_CALLS):
            reply = yield list(messages)
            if not reply.calls:
                return judge(question, reply.text, made)
            made += [ToolCall(call.name, call.parsed_arguments()) for call in reply.calls]
            results = [call.with_result(search(call.name, call.parsed_arguments())) for call in reply.calls]
            messages += [reply.message, *results]
        return judge(question, "", made)

    def replies(self, question: Mapping[str, Any], slip: random.Random | None) -> Iterator[Reply]:
        """The call, then what it found; slips are in the tool and in its argument."""
        tool, (value,) = question["tool"], question["arguments"].values()
        if slip and slip.random() < _WRONG_TOOL:
            tool = "search_mail" if slip.random() < _INVENTED else slip.choice(tuple(SEARCHES))
        column, values, _ = SEARCHES.get(tool, ("query", (), ()))
        if slip and values and slip.random() < _WRONG_ARGUMENT:
            value = slip.choice(values)
        yield call_of(tool, **{column: value})
        found = search(tool, {column: value})
        yield Reply("Nothing." if found.startswith("error") else f"Mails {found}.")
