"""Reads a reply as vLLM tells it, whole or in pieces, and tells it on to the client without what only we asked for.

Sans-I/O: a whole reply is a stream of one piece. Each `hear` takes one decoded JSON object and returns the client's
view of it (the same object, changed in place), or None for a piece that the client would never have got.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from explorer.sampling import Sampling
from shared.experience import Experience, pack_ids, pack_logprobs

Json = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """What has been heard of one choice so far."""

    prompt_ids: list[int] | None = None
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    unreadable: bool = False


@dataclass(slots=True, kw_only=True)
class Transcript:
    """One reply being heard.

    `wants_logprobs` and `wants_token_ids` say what the client itself asked for.
    """

    msg_id: str
    wants_logprobs: bool
    wants_token_ids: bool
    choices: dict[int, Choice] = field(default_factory=dict)
    broken: bool = False

    def hear(self, piece: Json) -> Json | None:
        """Take down one piece and return what the client gets of it."""
        if "error" in piece:
            self.broken = True
            return piece
        piece["id"] = self.msg_id
        told = [choice for choice in piece.get("choices", ()) if self._hear_choice(choice, piece)]
        if "choices" in piece and len(told) < len(piece["choices"]):
            if not told:
                return None
            piece["choices"] = told
        if not self.wants_token_ids and "prompt_token_ids" in piece:
            piece["prompt_token_ids"] = None
        return piece

    def _hear_choice(self, told: Json, piece: Json) -> bool:
        """Take down one choice; False if the client would not have got this piece of it."""
        choice = self.choices.setdefault(told["index"], Choice())
        if (prompt_ids := piece.get("prompt_token_ids")) is not None and _are_ids(prompt_ids):
            choice.prompt_ids = prompt_ids
        said = told.get("message") or told.get("delta") or {}
        choice.text.append(said.get("content") or "")
        choice.finish_reason = told.get("finish_reason") or choice.finish_reason
        ids = told.get("token_ids") or []
        logprobs = [entry["logprob"] for entry in (told.get("logprobs") or {}).get("content") or []]
        if len(ids) == len(logprobs) and _are_ids(ids) and all(isinstance(each, float | int) for each in logprobs):
            choice.completion_ids += ids
            choice.logprobs += logprobs
        else:
            choice.unreadable = True
        self._strip(told)
        only_ours = "delta" in told and not said and told.get("finish_reason") is None
        return self.wants_logprobs or self.wants_token_ids or not only_ours

    def _strip(self, told: Json) -> None:
        if not self.wants_logprobs and "logprobs" in told:
            told["logprobs"] = None
        if not self.wants_token_ids and "token_ids" in told:
            told["token_ids"] = None

    @property
    def complete(self) -> bool:
        """Whether every choice heard of has come to its end."""
        return not self.broken and bool(self.choices) and all(each.finish_reason for each in self.choices.values())

    def experiences(self, sampling: Sampling, *, versions: tuple[int, int], mixed: bool) -> tuple[Experience, ...]:
        """The choices as experiences: `versions` answered them, `mixed` if weights changed while they were sampled."""
        return tuple(
            Experience(
                choice=index,
                prompt_ids=pack_ids(choice.prompt_ids or []),
                completion_ids=pack_ids(choice.completion_ids),
                logprobs=pack_logprobs(choice.logprobs),
                version_min=min(versions),
                version_max=max(versions),
                temperature=sampling.temperature,
                finish_reason=choice.finish_reason,
                text="".join(choice.text),
                drop_reason=self._why_not_trainable(choice) or ("mixed_version" if mixed else sampling.off_policy),
            )
            for index, choice in sorted(self.choices.items())
        )

    def _why_not_trainable(self, choice: Choice) -> str | None:
        if self.broken or choice.finish_reason in {None, "abort", "error"}:
            return "cut_off"
        if choice.unreadable or choice.prompt_ids is None:
            return "no_token_ids"
        if not choice.completion_ids:
            return "no_token_ids" if any(choice.text) else "empty"
        if not all(math.isfinite(logprob) and logprob <= 0 for logprob in choice.logprobs):
            return "logprobs_not_finite"
        return None


def _are_ids(values: list[Any]) -> bool:
    return all(isinstance(each, int) and 0 <= each < 1 << 31 for each in values)
