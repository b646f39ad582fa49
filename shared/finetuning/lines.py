"""The lines of a JSONL file that a fine-tuning job learns from, as OpenAI's guides describe them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec


class FileLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line that is right; `number` counts from 1. `messages` come before what is learnt or asked.

    Of `supervised` the messages are all, and those of the assistant whose `weight` is not 0 are learnt. Of `dpo`,
    `preferred` and `rejected` are the two answers. Of `reinforcement`, `item` is the whole line, for graders.
    """

    number: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    preferred: dict[str, Any] | None = None
    rejected: dict[str, Any] | None = None
    item: dict[str, Any] = {}


class LineMistake(NamedTuple):
    """What is wrong with a line, by its number from 1."""

    number: int
    message: str


class FileCheck(NamedTuple):
    """How many lines a file has, and the first mistakes."""

    lines: int
    mistakes: list[LineMistake]


def read_lines(file: Path, method: str) -> Iterator[FileLine]:
    """The lines of a file for a method: supervised, dpo or reinforcement. Raises FileRefused at the first mistake."""
    raise NotImplementedError


def check_file(file: Path, method: str, *, most: int = 20) -> FileCheck:
    """Look at all lines, up to so many mistakes."""
    raise NotImplementedError
