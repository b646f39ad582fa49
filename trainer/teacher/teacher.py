"""The teacher of `distill`, a local model or an endpoint with the trained model's tokenizer, and its retries."""

import json
import math
import queue
import random
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import httpx
import numpy as np
import structlog
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from tuneloop.shared.errors import EnvironmentRefused, SamplesRefused, TeacherAway
from tuneloop.shared.experience import Sample
from tuneloop.shared.ledger.versions.alarms import Alarm, Alarms
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.batch import TokenSequence, collate, micro_batches, with_completion
from tuneloop.trainer.batches.tokenizer import ends_of, tokenizer_of
from tuneloop.trainer.models.model import Actor
from tuneloop.trainer.stop import Stop

_AT_ONCE = 8  # requests at a time
_PAUSES_S = (1.0, 4.0)  # seconds between the tries of a request
_KEEP_S = 4.0  # below the five seconds after which uvicorn, and so vLLM, closes an idle connection
_REFUSED = {400, 413, 422}  # statuses that no retry changes

#: Text of many scripts to compare tokenizers; special tokens are appended.
_SAMPLER = (
    "The quick brown fox jumps over 13 lazy dogs, doesn't it?\n\n\tdef f(x: int) -> float:\n        return x / 3.14"
    '\r\n{"a": [1e-9, null]} <b>&amp;</b> Zürich ñandú'
    " \u0416\u0443\u043a \u4f60\u597d\uff0c\u4e16\u754c \u3054\u98ef \ud55c\uad6d\uc5b4 \U0001f642"
)
_MOST_SPECIALS = 256

_Response = tuple[int, Any] | TeacherAway  # status and JSON of an answer, or the error after all tries

_Read = TypeVar("_Read")


class RemoteTeacher:
    """A model behind `algorithm.distill.teacher_url`. `stop` ends each wait."""

    def __init__(self, settings: Settings, stop: Stop, *, pauses_s: Sequence[float] = _PAUSES_S) -> None:
        wanted = settings.algorithm.distill
        assert wanted.teacher_url is not None
        base = wanted.teacher_url.rstrip("/")
        self._url = f"{base}/completions" if urlsplit(base).path else f"{base}/v1/completions"
        self._headers = {"content-type": "application/json"}
        if wanted.teacher_key:
            self._headers["authorization"] = f"Bearer {wanted.teacher_key.get_secret_value()}"
        self._model, self._timeout = wanted.teacher_model, wanted.timeout
        self._settings, self._stop, self._pauses_s = settings, stop, pauses_s
        self._tls = ssl.create_default_context()
        self._known = False

    def check(self) -> None:
        """Raise EnvironmentRefused unless it accepts token ids, returns log-probabilities, and has our tokenizer."""
        if self._known:
            return
        words = tokenizer_of(self._settings)
        specials = sorted(words.added_tokens_decoder)[:_MOST_SPECIALS]
        text = _SAMPLER + "".join(words.convert_ids_to_tokens(specials))
        request = {"prompt": text, "add_special_tokens": False, "return_token_ids": True, **_SCORE}
        with self._client() as client:
            status, answer = self._patiently(client, request)
        if status != 200:
            self._refuse(f"answers {status}: {_message(answer)}")
        choice = _choice(answer)
        if not isinstance(choice.get("prompt_token_ids"), list) or not choice.get("prompt_logprobs"):
            self._refuse(
                "does not return log-probabilities of given tokens, as vLLM does; OpenAI's models cannot be teachers"
            )
        if choice["prompt_token_ids"] != words.encode(text, add_special_tokens=False):
            self._refuse("has another tokenizer than the model; choose a teacher with the same one")
        self._known = True

    def score(self, sequences: Sequence[TokenSequence], *, tokens: int | None = None) -> Tensor:
        self.check()
        requests = [{"prompt": each.ids.tolist(), **_SCORE} for each in sequences]
        calls = [each.calls for each in sequences]
        rows = self._read(requests, calls, lambda turn, choice: _logprobs(sequences[turn], choice))
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def reply(self, samples: Sequence[Sample]) -> list[Sample]:
        self.check()
        most = self._settings.model.max_response_tokens or MOST_TOKENS
        options = {"max_tokens": most, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "return_token_ids": True}
        requests = [{"prompt": each.prompt_ids.tolist(), **options} for each in samples]
        replies = self._read(requests, [(each,) for each in samples], lambda _, choice: _reply_ids(choice, most))
        return with_replies(samples, replies, known=len(tokenizer_of(self._settings)))

    def _read(
        self,
        bodies: Sequence[Mapping[str, object]],
        calls: Sequence[Sequence[Sample]],
        read: Callable[[int, dict[str, Any]], _Read],
    ) -> list[_Read]:
        """Parse the answers by `read`, in the order of the requests, each about some `calls`."""
        refused: defaultdict[str, list[int]] = defaultdict(list)
        failed: defaultdict[str, list[int]] = defaultdict(list)
        found: list[_Read] = []
        for turn, response in sorted(self._all(bodies).items()):
            if isinstance(response, tuple) and response[0] in _REFUSED:
                refused[f"the teacher refuses it: {_message(response[1])}"] += [each.id for each in calls[turn]]
                continue
            try:
                if isinstance(response, TeacherAway):
                    raise response
                if response[0] != 200:
                    raise TeacherAway(f"{self._url} answers {response[0]}: {_message(response[1])}")
                found.append(read(turn, _choice(response[1])))
            except TeacherAway as error:
                failed[str(error)] += [each.id for each in calls[turn]]
        if refused:
            raise SamplesRefused(dict(refused))
        if failed:
            raise TeacherAway(next(iter(failed)), dict(failed) if found else {})
        return found

    def _refuse(self, sentence: str) -> None:
        raise EnvironmentRefused(f"algorithm.distill.teacher_url: {self._url} {sentence}")

    def _all(self, bodies: Sequence[Mapping[str, object]]) -> dict[int, _Response]:
        """Answers by request number; after many failures in a row, some requests have none."""
        # Random order, so that rows that always fail do not block the others.
        turns, given_up = iter(random.sample(range(len(bodies)), len(bodies))), threading.Event()
        responses: queue.SimpleQueue[tuple[int, _Response]] = queue.SimpleQueue()

        def ask() -> None:
            # One client per thread, closed when the thread is done.
            with self._client() as client:
                while not given_up.is_set() and (turn := next(turns, None)) is not None:
                    try:
                        responses.put((turn, self._patiently(client, bodies[turn])))
                    except TeacherAway as error:
                        responses.put((turn, error))

        threads = [threading.Thread(target=ask, name="teacher", daemon=True) for _ in range(_AT_ONCE)]
        for thread in threads:
            thread.start()
        answers: dict[int, _Response] = {}
        failed_in_a_row = 0
        try:
            while len(answers) < len(bodies) and failed_in_a_row < _AT_ONCE:
                # Checked before the queue, so that a thread's last answer is not missed.
                alive = any(thread.is_alive() for thread in threads)
                try:
                    turn, answer = responses.get(timeout=0.2)
                except queue.Empty:
                    if self._stop.is_set():
                        raise TeacherAway("stopped") from None
                    if not alive:
                        raise RuntimeError("the threads that ask the teacher have died") from None
                    continue
                answers[turn] = answer
                failed_in_a_row = failed_in_a_row + 1 if isinstance(answer, TeacherAway) else 0
        finally:
            given_up.set()
        return answers

    def _client(self) -> httpx.Client:
        return httpx.Client(
            headers=self._headers,
            timeout=self._timeout,
            verify=self._tls,
            limits=httpx.Limits(keepalive_expiry=_KEEP_S),
            follow_redirects=True,
        )

    def _patiently(self, client: httpx.Client, body: Mapping[str, object]) -> tuple[int, Any]:
        """Status and JSON of the answer, with retries. Raises TeacherAway."""
        reason = ""
        for pause in (*self._pauses_s, None):
            try:
                reply = client.post(self._url, content=json.dumps({"model": self._model, **body}).encode())
                status = reply.status_code
                answer = json.loads(reply.content) if reply.is_success else reply.content.decode(errors="replace")
            except (httpx.HTTPError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if status not in {408, 409, 425, 429} and status < 500:
                    return status, answer
                reason = f"{status}: {_message(answer)}"
            if pause is not None and self._stop.wait(pause):
                break
        raise TeacherAway(f"{self._url} does not answer: {reason}")


#: vLLM's shortest answer: one generated token, and each prompt token without alternatives.
_SCORE: Mapping[str, object] = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}


def _logprobs(sequence: TokenSequence, choice: Mapping[str, Any]) -> Tensor:
    """Log-probabilities from the first reply token on. Raises TeacherAway for other tokens."""
    logprobs = choice.get("prompt_logprobs")
    if not isinstance(logprobs, list) or len(logprobs) != len(sequence.ids):
        raise TeacherAway("the teacher returns no log-probability of each token")
    row = np.zeros(len(sequence.ids), np.float32)
    for at in np.flatnonzero(sequence.of >= 0):
        entry = logprobs[at].get(str(int(sequence.ids[at]))) if isinstance(logprobs[at], dict) else None
        if not isinstance(entry, dict):
            raise TeacherAway("the teacher returns log-probabilities of other tokens than those of the request")
        number = entry.get("logprob")
        if not isinstance(number, int | float) or math.isnan(number):
            raise TeacherAway(NO_NUMBER)
        row[at] = number
    return torch.from_numpy(row[sequence.start :])


def _reply_ids(choice: Mapping[str, Any], most: int) -> list[int] | str:
    """The ids of a reply, or the reason without any."""
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise TeacherAway("the teacher returns no token ids any more")
    if choice.get("finish_reason") != "stop" or not ids:
        return CUT_OFF.format(most)
    return ids


def _choice(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _message(answer: Any) -> str:
    """The message of an error, in OpenAI's envelope or not: one line of at most 300 characters."""
    if isinstance(answer, str):
        with suppress(ValueError):
            answer = json.loads(answer)
    if isinstance(answer, dict):
        inner = answer.get("error")
        answer = inner.get("message") if isinstance(inner, dict) else inner or answer
    return " ".join(str(answer).split())[:300]


MOST_TOKENS = 2048  # longest reply of a teacher without `model.max_response_tokens`

CUT_OFF = "the teacher's reply was cut off at {} tokens"
NO_NUMBER = "the teacher's log-probability of a token is not a number"
_NO_ROOM = "the GPU's memory has no room for the teacher's reply"


class Teacher(Protocol):
    """A teacher. `score` and `reply` raise TeacherAway or SamplesRefused."""

    def check(self) -> None:
        """Raise EnvironmentRefused if it cannot teach this model, TeacherAway if it does not answer."""

    def score(self, sequences: Sequence[TokenSequence], *, tokens: int | None = None) -> Tensor:
        """Log-probabilities of action tokens at temperature 1, of shape BR; `tokens` per pass, None: the settings'."""
        ...

    def reply(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the teacher's replies, sampled at temperature 1."""
        ...


class _Numbers(LogitsProcessor):
    """Raises FloatingPointError before sampling from NaN, which on a GPU ends the process."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.isnan().any():
            raise FloatingPointError(NO_NUMBER)
        return scores


class LocalTeacher:
    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._actor = Actor.load(settings, folder)
        self._actor.network.requires_grad_(requires_grad=False)
        self._words = tokenizer_of(settings, folder, "algorithm.distill.teacher_path")

    def check(self) -> None:
        """Raise EnvironmentRefused unless both tokenizers have the same vocabulary."""
        ours, theirs = tokenizer_of(self._settings).get_vocab(), self._words.get_vocab()
        if ours != theirs:
            different = next(word for word in {**ours, **theirs} if ours.get(word) != theirs.get(word))
            raise EnvironmentRefused(
                f"algorithm.distill.teacher_path: its tokenizer is another than the model's: {different!r} is token "
                f"{theirs.get(different)} there and {ours.get(different)} here; choose a teacher with the same one"
            )

    @torch.no_grad()
    def score(self, sequences: Sequence[TokenSequence], *, tokens: int | None = None) -> Tensor:
        """Also raises torch.OutOfMemoryError."""
        self._must_know(call for sequence in sequences for call in sequence.calls)
        batch = collate(sequences)
        batch = replace(batch, temperatures_BR=torch.ones_like(batch.temperatures_BR))
        all_BR = torch.zeros_like(batch.sampled_BR)
        budget, padded = tokens or self._settings.trainer.tokens_at_once, not self._actor.is_packed
        for index_B in micro_batches(batch.lengths_B, budget, padded=padded):
            part_BR = self._actor.logprobs(batch.rows(index_B)).cpu()
            all_BR[index_B, : part_BR.shape[1]] = part_BR
        strange_B = all_BR.isnan().any(1)
        if strange_B.all():
            raise TeacherAway(NO_NUMBER)
        if strange_B.any():
            raise SamplesRefused(
                {NO_NUMBER: [call.id for at in strange_B.nonzero()[:, 0] for call in sequences[at].calls]}
            )
        return all_BR

    @torch.no_grad()
    def reply(self, samples: Sequence[Sample]) -> list[Sample]:
        """A repeated request for a sample gets the same reply."""
        self._must_know(samples)
        most = self._settings.model.max_response_tokens or MOST_TOKENS
        ends = ends_of(self._settings.model.model_path, self._words)
        replies = [self._reply_ids(sample, most, ends) for sample in samples]
        if all(each in (NO_NUMBER, _NO_ROOM) for each in replies):
            raise TeacherAway(str(replies[0]))
        return with_replies(samples, replies, known=len(self._words))

    def _reply_ids(self, sample: Sample, most: int, ends: list[int]) -> list[int] | str:
        try:
            ids_1T = torch.tensor(sample.prompt_ids.astype(np.int64), device=self._actor.network.device)[None]
            with torch.random.fork_rng():
                torch.manual_seed(self._settings.trainer.seed + sample.id)
                generated = cast(Any, self._actor.network).generate(
                    ids_1T,
                    attention_mask=torch.ones_like(ids_1T),
                    max_new_tokens=most,
                    do_sample=True,
                    temperature=1.0,
                    top_p=1.0,
                    top_k=0,
                    eos_token_id=ends,
                    pad_token_id=ends[0],
                    logits_processor=LogitsProcessorList([_Numbers()]),
                )
            ids = cast(list[int], generated[0, ids_1T.shape[1] :].tolist())
        except FloatingPointError as error:
            return str(error)
        except torch.OutOfMemoryError:
            return _NO_ROOM
        return ids if ids[-1] in ends else CUT_OFF.format(most)

    def _must_know(self, samples: Iterable[Sample]) -> None:
        known = self._actor.vocabulary
        strange = [s.id for s in samples if max(s.prompt_ids.max(), s.completion_ids.max(initial=0)) >= known]
        if strange:
            raise SamplesRefused({f"a token is outside the teacher's vocabulary of {known}": strange})


def with_replies(samples: Sequence[Sample], replies: Sequence[list[int] | str], *, known: int) -> list[Sample]:
    """The samples with other replies. Raises SamplesRefused for reasons, and for ids beyond the `known` tokens."""
    refused: defaultdict[str, list[int]] = defaultdict(list)
    demonstrations = []
    for sample, reply in zip(samples, replies, strict=True):
        if isinstance(reply, str):
            refused[reply].append(sample.id)
        elif not all(0 <= token < known for token in reply):
            refused[f"the teacher's reply has a token beyond the tokenizer's {known}"].append(sample.id)
        else:
            demonstrations.append(with_completion(sample, reply))
    if refused:
        raise SamplesRefused(dict(refused))
    return demonstrations


_log = structlog.get_logger()

_AWAY = "teacher_away"
_RETRY_S = 3.0

_MAX_FAILURES = 3  # failures in a row, while the teacher answers for others, that drop a sample
_ALARM_AFTER = 10  # failed attempts in a row that raise an alarm: more than drop a sample


class TeacherRetries:
    """Creates the settings' teacher, if any, and retries requests. Raises EnvironmentRefused for an unsuitable teacher.

    A teacher that does not answer at the start is checked again with the first batch. `_failed_attempts` counts
    attempts in a row without a batch; `_failures`, by sample id, those in which the teacher answered for others.
    `_alarm_open` None: an earlier trainer may have raised the alarm.
    """

    def __init__(self, settings: Settings, alarms: Alarms, stop: Stop, *, retry_s: float = _RETRY_S) -> None:
        distill = settings.algorithm.distill
        self.teacher: Teacher | None = None
        if settings.algorithm.algorithm_type == "distill" and distill.teacher_path is not None:
            self.teacher = LocalTeacher(settings, distill.teacher_path)
        elif settings.algorithm.algorithm_type == "distill":
            self.teacher = RemoteTeacher(settings, stop)
        self._learns_replies = settings.algorithm.distill.mode == "replies"
        self._alarms, self._stop, self._retry_s = alarms, stop, retry_s
        self._failed_attempts = 0
        self._failures: dict[int, int] = {}
        self._alarm_open: bool | None = None
        if self.teacher is not None:
            try:
                self.teacher.check()
            except TeacherAway as error:
                self._count_failure(error)

    def label(self, batch: list[Sample]) -> list[Sample]:
        """The batch, with the teacher's replies if these are trained on. Raises TeacherAway or SamplesRefused."""
        if self.teacher is None or not self._learns_replies:
            return batch
        return self.teacher.reply(batch)

    def requeue(
        self, batch: Sequence[Sample], error: TeacherAway | SamplesRefused, *, drop: Callable[[list[Sample], str], None]
    ) -> list[Sample]:
        """The samples of a failed batch to retry: all after a wait, or those that are not dropped."""
        if isinstance(error, TeacherAway):
            self._count_failure(error)
            # While the teacher answers for no sample, none is dropped.
            failed_ids = {number for ids in error.failed.values() for number in ids}
            if failed_ids:
                self._failures = {number: self._failures.get(number, 0) + 1 for number in failed_ids}
            prefix = f"the teacher answers for other samples, but failed {_MAX_FAILURES} times in a row on this one"
            found = {
                f"{prefix}: {reason}": [number for number in ids if self._failures[number] >= _MAX_FAILURES]
                for reason, ids in error.failed.items()
            }
            refused: Mapping[str, Sequence[int]] = {reason: ids for reason, ids in found.items() if ids}
            if not refused:
                self._stop.wait(self._retry_s)
        else:
            refused = error.refused
        for reason, ids in refused.items():
            drop([sample for sample in batch if sample.id in ids], reason)
        dropped = {number for ids in refused.values() for number in ids}
        return [sample for sample in batch if sample.id not in dropped]

    def succeeded(self) -> None:
        """Note a trained batch: the teacher, if any, answered. Raises LedgerUnavailable."""
        if self._alarm_open is not False:
            self._alarms.clear(_AWAY)
            self._alarm_open = False
        if self._failed_attempts:
            _log.info("teacher_back")
        self._failed_attempts = 0
        self._failures.clear()

    def _count_failure(self, error: TeacherAway) -> None:
        if self._stop.is_set():
            return
        if not self._failed_attempts:
            _log.warning("teacher_away", reason=str(error))
        self._failed_attempts += 1
        if self._failed_attempts >= _ALARM_AFTER and not self._alarm_open:
            reason = f"the teacher failed to answer for a batch {self._failed_attempts} times in a row: {error}"
            if self._alarms.raise_alarm(Alarm(name=_AWAY, reason=f"{reason}; training waits for it")):
                _log.error("alarm_raised", alarm=_AWAY, reason=reason)
            self._alarm_open = True
