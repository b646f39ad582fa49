"""Whether a reply was cut off at its limit of tokens, whatever the engine calls its end.

vLLM says `tool_calls` of a reply in which its parser finds a call, also where the limit ended it within that call.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tuneloop.shared.settings.settings import Settings

#: How many tokens the client wants of a choice, by the names that engines take.
LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

#: What engines call the end of a reply that may have been cut off all the same.
_WHOLE = frozenset({"stop", "tool_calls", "function_call"})


class ReplyLimit(NamedTuple):
    """The most tokens of a reply, and of its prompt with it; None: unknown. `ends` are the tokens that end a reply."""

    ends: frozenset[int]
    context: int | None = None
    most: int | None = None

    def cuts(self, finish_reason: str | None, prompt: int, completion_ids: Sequence[int]) -> bool:
        """Whether these ids, behind a prompt of so many, fill the limit and do not end by themselves.

        `finish_reason` is the engine's.
        """
        limits = [self.most] if self.most is not None else []
        limits += [self.context - prompt] if self.context is not None else []
        is_known = finish_reason in _WHOLE and self.ends and limits and completion_ids
        return bool(is_known) and completion_ids[-1] not in self.ends and len(completion_ids) >= min(limits)

    def of(self, upstream: Mapping[str, Any], default: int | None) -> "ReplyLimit":
        """That of one request, which asks for the `default` if it says nothing."""
        asked = next((value for name in LENGTHS if (value := upstream.get(name)) is not None), default)
        with suppress(TypeError, ValueError):  # the engine refuses it
            return self._replace(most=None if asked is None else int(asked))
        return self


def limit_of(settings: Settings) -> ReplyLimit:
    """What the model's folder and the settings say of every reply."""
    folder = settings.model.model_path
    config, length = _read(folder / "config.json"), settings.model.max_model_len
    context = length or (config.get("text_config") or config).get("max_position_embeddings")
    return ReplyLimit(frozenset(_ends(folder)), context if isinstance(context, int) else None)


def _ends(folder: Path) -> Iterator[int]:
    for name in ("generation_config.json", "config.json"):
        config = _read(folder / name)
        for found in (config.get("eos_token_id"), (config.get("text_config") or {}).get("eos_token_id")):
            yield from (each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int))
    tokenizer = _read(folder / "tokenizer_config.json")
    token = tokenizer.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = [(int(number), each) for number, each in (tokenizer.get("added_tokens_decoder") or {}).items()]
    added = added or [(each["id"], each) for each in _read(folder / "tokenizer.json").get("added_tokens") or ()]
    yield from (number for number, each in added if each.get("content") == text)


def _read(file: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    with suppress(OSError, ValueError):
        if isinstance(found := json.loads(file.read_bytes()), dict):
            return found
    return {}
