"""Renders lines of a file to token ids by the model's chat template.

For each trained assistant message, the prompt is the template's text of the earlier messages, as an engine gets it; the
reply is the template's text of the message, up to the token that ends its turn.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
from jinja2 import TemplateError

from tuneloop.shared.errors import EnvironmentRefused, FileRefused
from tuneloop.shared.experience import Experience, Sample, pack_ids, pack_logprobs
from tuneloop.shared.finetuning.lines import FileLine, read_lines
from tuneloop.shared.ledger.training.file_rows import UNSAMPLED, WrittenReply
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.batch import with_completion
from tuneloop.trainer.batches.edited_answers import Unwritable, edited_answer_ids, with_parsed_arguments
from tuneloop.trainer.batches.selection import Refused, longest_of
from tuneloop.trainer.batches.tokenizer import tokenizer_of

_INSTRUCTING = ("system", "developer")  # roles of instructions


class TrainedAnswer(NamedTuple):
    """One answer to a prompt, or a preferred and a rejected one; each with its reward."""

    messages: Sequence[Mapping[str, Any]]
    answers: Sequence[Mapping[str, Any]]
    rewards: Sequence[float]


class LineSkipped(Exception):
    """The line cannot be trained on, for the reason in the message."""


class LineTooLong(LineSkipped):
    """The line has more tokens than `longest`, the model's limit."""

    def __init__(self, tokens: int, longest: float) -> None:
        super().__init__(f"too long: {tokens} tokens, and the model takes {longest:.0f}")
        self.longest = longest


def answers_in(line: FileLine) -> Iterator[TrainedAnswer]:
    """The answers to train on: of a conversation, each assistant message without weight 0."""
    if line.preferred is not None and line.rejected is not None:
        yield TrainedAnswer(line.messages, (line.preferred, line.rejected), (1.0, 0.0))
        return
    for at, message in enumerate(line.messages):
        if message.get("role") == "assistant" and message.get("weight") != 0:
            yield TrainedAnswer(line.messages[:at], (message,), (1.0,))


def render(learnt: TrainedAnswer, tools: list[dict[str, Any]] | None, settings: Settings) -> list[Experience]:
    """The answers with their token ids. Raises LineSkipped if the template refuses them, or they are too long."""
    words = tokenizer_of(settings)
    longest = settings.model.max_model_len or longest_of(settings.model.model_path)
    if words.chat_template is None:
        raise LineSkipped("the model has no chat template")
    prompt, reason = list[int](), "it loses an instruction"
    try:
        turns = [_plain(each) for each in learnt.messages]
        instructions = [each["content"] for each in turns if each["role"] in _INSTRUCTING]
        others = [each for each in turns if each["role"] not in _INSTRUCTING]
        # Some templates lose or refuse instructions; merge them then, as the explorer does.
        merged = [{"role": "system", "content": "\n\n".join(filter(None, instructions))}, *others]
        for each in (turns, merged) if instructions else (turns,):
            try:
                written = words.apply_chat_template(
                    each, tools=list[Any](tools) if tools else None, add_generation_prompt=True, tokenize=False
                )
            except TemplateError as error:
                reason = str(error)
                continue
            if all(text.strip() in str(written) for text in instructions):
                prompt = words.encode(str(written), add_special_tokens=False)
                break
    except (Unwritable, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = str(error)
    if not prompt:
        raise LineSkipped(f"the chat template does not write it: {reason}")
    found = []
    for choice, message in enumerate(learnt.answers):
        try:
            plain = _plain(message)
        except Unwritable as error:
            raise LineSkipped(str(error)) from None
        ids = edited_answer_ids(without_answer(prompt), json.dumps(plain | {"role": "assistant"}), settings)
        if isinstance(ids, str):
            raise LineSkipped(ids.replace("the edited answer", "the answer"))
        if len(prompt) + len(ids) > longest:
            raise LineTooLong(len(prompt) + len(ids), longest)
        calls = message.get("tool_calls")
        found.append(
            Experience(
                choice=choice,
                prompt_ids=pack_ids(prompt),
                completion_ids=pack_ids(ids),
                logprobs=pack_logprobs([0.0] * len(ids)),
                version_min=0,
                version_max=0,
                temperature=1.0,
                finish_reason="tool_calls" if calls else "stop",
                text=plain["content"],
                tool_calls=json.dumps(calls).encode() if calls else None,
                unsampled=UNSAMPLED,
            )
        )
    return found


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates need it: text, and parsed arguments of calls. Raises Unwritable."""
    plain = {name: value for name, value in message.items() if value is not None and name != "weight"}
    content = plain.get("content", plain.get("refusal") or "")
    if not isinstance(content, str):
        parts = content if isinstance(content, list) else [content]
        if not all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in parts):
            raise Unwritable("a message is more than text")
        content = "\n".join(each["text"] for each in parts)
    plain["content"] = content
    if plain.get("tool_calls"):
        plain["tool_calls"] = with_parsed_arguments(plain["tool_calls"])
    return plain


def with_token_ids(
    samples: Sequence[Sample], written: Mapping[str, WrittenReply], settings: Settings
) -> tuple[list[Sample], Refused]:
    """The samples, with token ids for those imported as text; and those without."""
    taken: list[Sample] = []
    refused: Refused = defaultdict(list)
    for sample in samples:
        if len(sample.completion_ids):
            taken.append(sample)
            continue
        reply = written[sample.msg_id]
        try:
            request = json.loads(reply.request)
            calls = {"tool_calls": json.loads(reply.tool_calls)} if reply.tool_calls else {}
            learnt = TrainedAnswer(
                request["messages"], ({"role": "assistant", "content": reply.text, **calls},), (1.0,)
            )
            [answer] = render(learnt, request.get("tools"), settings)
        except (LineSkipped, KeyError, TypeError, ValueError) as error:
            refused[f"imported as text: {error}"].append(sample)
            continue
        prompt, ids = (np.frombuffer(each, "<i4") for each in (answer.prompt_ids, answer.completion_ids))
        taken.append(with_completion(msgspec.structs.replace(sample, prompt_ids=prompt), ids.tolist()))
    return taken, dict(refused)


def held_out(experience: Experience, number: int) -> Sample:
    """An answer for evaluation, with its own number."""
    prompt, answer = (np.frombuffer(each, "<i4") for each in (experience.prompt_ids, experience.completion_ids))
    return msgspec.structs.replace(
        without_answer(prompt.tolist(), number), completion_ids=answer, logprobs=np.zeros(len(answer), np.float32)
    )


def without_answer(prompt: Sequence[int], number: int = 0) -> Sample:
    return Sample(
        id=number,
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        reward=0.0,
        temperature=1.0,
        version_min=0,
        version_max=0,
        tenant="",
        task_id=None,
        run_id=None,
        group_id=None,
        rewarded_at=0.0,
        committed_at=0.0,
    )


class MixedFile:
    """Rows of `algorithm.mix` by step number and `trainer.seed`; each is used once before any repeats."""

    def __init__(self, rows: list[Sample], *, count: int, share: float, seed: int) -> None:
        """`share` is the weight of the rows' loss; the others have 1 - `share`."""
        self._rows, self._count, self.share, self._seed = rows, count, share, seed
        self._order = lru_cache(2)(self._shuffle)

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """The file of the settings, or None. Raises EnvironmentRefused with the line that cannot be trained on."""
        mix = settings.algorithm.mix
        if mix.file is None:
            return None
        rows: list[Sample] = []
        try:
            for line in read_lines(mix.file, "supervised"):
                for learnt in answers_in(line):
                    written = render(learnt, line.tools, settings)
                    # Negative numbers are no rows of the ledger.
                    rows += [held_out(each, -1 - number) for number, each in enumerate(written, len(rows))]
        except OSError as error:
            raise EnvironmentRefused(f"algorithm.mix.file: {mix.file} cannot be read: {error.strerror}") from None
        except LineSkipped as error:
            why = str(error)
            if isinstance(error, LineTooLong):
                why = f"it has more than the {error.longest:.0f} tokens of model.max_model_len"
            raise EnvironmentRefused(f"algorithm.mix.file: {mix.file}: line {line.number}: {why}") from None
        except FileRefused as error:
            raise EnvironmentRefused(f"algorithm.mix.file: {mix.file}: {error}") from None
        if not rows:
            raise EnvironmentRefused(f"algorithm.mix.file: {mix.file} has nothing to be learnt")
        # As many rows as make up the share of all rows of the step.
        count = max(1, round(settings.buffer.train_batch_size * mix.share / (1 - mix.share)))
        return cls(rows, count=count, share=mix.share, seed=settings.trainer.seed)

    def rows(self, step: int) -> list[Sample]:
        numbers = range(step * self._count, (step + 1) * self._count)
        places = (divmod(number, len(self._rows)) for number in numbers)
        return [self._rows[self._order(epoch)[place]] for epoch, place in places]

    def _shuffle(self, epoch: int) -> list[int]:
        found: list[int] = np.random.default_rng((self._seed, epoch)).permutation(len(self._rows)).tolist()
        return found
