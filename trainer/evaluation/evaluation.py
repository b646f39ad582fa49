"""Evaluates versions on held-out tasks: the actor answers greedily, and a judge scores the answers.

Equal weights get equal scores. For the gate, each version is evaluated before the explorer may load it, on the
trainer's GPU, so that no engine is needed.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import structlog
import torch
from jinja2 import TemplateError
from transformers import GenerationConfig

from tuneloop.runner.errors import JudgeAway, JudgeFailed
from tuneloop.runner.judging.judge import Judge as ModelJudge
from tuneloop.runner.judging.rubric import Rubric
from tuneloop.runner.rewards.reply import Reply
from tuneloop.shared.checkpoints import ACTOR
from tuneloop.shared.errors import EnvironmentRefused, NotEvaluated
from tuneloop.shared.evaluation.gate import evaluator_of, gate_verdict
from tuneloop.shared.evaluation.scores import SCORE, EvaluationProgress, Figure, TaskReply, figures_of, figures_on
from tuneloop.shared.evaluation.tasks import Judge, Task, fingerprint, judge_of, tasks_of, without_reasoning
from tuneloop.shared.experience import Evaluator, VersionAction
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.settings.feedback import JudgeSettings as JudgeSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import reveal
from tuneloop.trainer.batches.batch import Metrics
from tuneloop.trainer.batches.tokenizer import ends_of, tokenizer_of
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.models.model import Actor

_log = structlog.get_logger()

_AGAIN_S = 60.0


@contextmanager
def judging(settings: Settings) -> Iterator[Judge]:
    """The judge of one evaluation. Raises EnvironmentRefused without its function or rubric."""
    known = judge_of(settings.monitor.evaluation)
    if known is not None:
        yield known
        return
    options = settings.judge
    if options.url is None:
        raise EnvironmentRefused("monitor.evaluation.judge: model needs judge.url and judge.model: which model judges")
    rubric = Rubric(criteria=options.criteria, weights=options.weights, scale=options.scale)
    try:
        rubric = rubric if options.rubric is None else Rubric.load(options.rubric)
        model = ModelJudge(
            base_url=options.url,
            model=options.model or "",
            api_key=reveal(options.key),
            criteria=rubric.criteria,
            weights=rubric.weights,
            scale=rubric.scale,
            samples=options.samples,
            temperature=options.temperature,
            timeout=options.timeout,
            retries=options.retries,
            concurrency=options.concurrency,
        )
    except (OSError, ValueError) as error:
        raise EnvironmentRefused(f"judge: {error}") from None

    def judge(task: Task, reply: str) -> float | None:
        candidate = Reply(text=without_reasoning(reply), messages=tuple(task.messages), expected=task.answer)
        try:
            return model.score(candidate).normalised
        except JudgeFailed:
            return None
        except JudgeAway as error:
            raise NotEvaluated(f"the judge is unavailable: {error.reason}") from None

    try:
        yield judge
    finally:
        model.close()


class HeldOut:
    def __init__(self, settings: Settings, tasks: Sequence[Task]) -> None:
        """Raises EnvironmentRefused for a task that does not fit the model."""
        self._options = settings.monitor.evaluation
        self._budget = settings.trainer.tokens_at_once
        self._tokenizer = tokenizer_of(settings)
        self._ends = ends_of(settings.model.model_path, self._tokenizer)
        self._settings = settings
        with judging(settings):  # raises now what it would raise later
            pass
        self._refusals = settings.monitor.drift.refusals_found
        #: Identifies the tasks and how they are judged.
        self.fingerprint = fingerprint(tasks, self._options, settings.judge)
        longest = settings.model.max_model_len
        self._asked: list[tuple[Task, list[int]]] = []
        for task in tasks:
            ids = self._ids(task)
            if not ids:
                raise self._refusal(task, "the question has no tokens")
            if longest is not None and len(ids) + self._options.most_tokens > longest:
                raise self._refusal(
                    task,
                    f"a question of {len(ids)} tokens and a reply of monitor.evaluation.most_tokens,"
                    f" {self._options.most_tokens}, are more than model.max_model_len, {longest}",
                )
            self._asked.append((task, ids))
        self._asked.sort(key=lambda asked: len(asked[1]))

    def score(self, actor: Actor) -> Metrics:
        """The mean score of all tasks and of each slice, as curves. Raises NotEvaluated."""
        started = time.perf_counter()
        scores = {each.slice: each.value for each in self.figures(actor) if each.metric == SCORE}
        means = {f"evaluation/score/{part}" if part else "evaluation/score": value for part, value in scores.items()}
        return means | {"time/evaluation": time.perf_counter() - started}

    def figures(self, actor: Actor) -> tuple[Figure, ...]:
        """Score, length and refusals of the actor's replies. Raises NotEvaluated."""
        generated: list[tuple[Task, list[int]]] = []
        progress = EvaluationProgress(len(self._asked))
        for part in self._batches():
            replies = self._generate(actor, [ids for _, ids in part])
            generated += [(task, ids) for (task, _), ids in zip(part, replies, strict=True)]
            progress.add(len(part))
        pairs = [(task, cast(str, self._tokenizer.decode(ids, skip_special_tokens=True))) for task, ids in generated]
        try:
            with judging(self._settings) as judge:
                if self._options.judge != "model":
                    scores = [judge(*each) for each in pairs]
                else:
                    with ThreadPoolExecutor(self._settings.judge.concurrency) as threads:
                        scores = list(threads.map(lambda each: judge(*each), pairs))
        except EnvironmentRefused as error:  # it existed at the start
            raise NotEvaluated(str(error)) from error
        answered = [
            TaskReply(task, reply, len(ids), score, whole=ids[-1] in self._ends)
            for (task, ids), (_, reply), score in zip(generated, pairs, scores, strict=True)
        ]
        return figures_of(answered, fingerprint=self.fingerprint, refusals=self._refusals)

    def _batches(self) -> Iterator[list[tuple[Task, list[int]]]]:
        """Questions of similar length, as many at once as the trainer's token budget allows."""
        part: list[tuple[Task, list[int]]] = []
        for question in self._asked:
            if part and (len(part) + 1) * (len(question[1]) + self._options.most_tokens) > self._budget:
                yield part
                part = []
            part.append(question)
        yield part

    @torch.no_grad()
    def _generate(self, actor: Actor, prompts: Sequence[list[int]]) -> list[list[int]]:
        """The replies' tokens, each up to its end token."""
        network = actor.network
        padding = self._tokenizer.pad_token_id or 0
        # All are given, so that the model's generation_config.json has no effect.
        greedy = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            num_beams=1,
            max_new_tokens=self._options.most_tokens,
            temperature=1.0,
            top_k=50,
            top_p=1.0,
            repetition_penalty=1.0,
            eos_token_id=self._ends,
            pad_token_id=padding,
            use_cache=True,
        )
        longest = max(map(len, prompts))  # padded on the left
        ids_BT = torch.tensor([[padding] * (longest - len(ids)) + ids for ids in prompts]).to(network.device)
        mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]).to(network.device)
        generated_BT = cast(Any, network).generate(ids_BT, attention_mask=mask_BT, generation_config=greedy)
        rows = generated_BT[:, ids_BT.shape[1] :].tolist()
        return [next((ids[: at + 1] for at, token in enumerate(ids) if token in self._ends), ids) for ids in rows]

    def _ids(self, task: Task) -> list[int]:
        if isinstance(task.question, str):
            return cast(list[int], self._tokenizer(task.question)["input_ids"])
        try:
            text = self._tokenizer.apply_chat_template(task.question, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise self._refusal(task, f"the model's chat template does not take the messages: {error}") from error
        return cast(list[int], self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _refusal(self, task: Task, reason: str) -> EnvironmentRefused:
        return EnvironmentRefused(f"monitor.evaluation.path: {self._options.path}, line {task.line}: {reason}")


def is_evaluated_here(settings: Settings) -> bool:
    return settings.gate.mode != "off" and evaluator_of(settings) is Evaluator.TRAINER


class GateEvaluation:
    """Evaluates versions for one trainer. Raises EnvironmentRefused for tasks that do not fit the model."""

    def __init__(self, settings: Settings, ledger: Ledger, *, again_s: float = _AGAIN_S) -> None:
        self._settings, self._ledger, self._again_s = settings, ledger, again_s
        #: Whether versions are evaluated here, while the learner has their weights.
        self.wanted = is_evaluated_here(settings)
        tasks = tasks_of(settings.monitor.evaluation) if self.wanted else []
        self._held_out = HeldOut(settings, tasks) if tasks else None
        self._fingerprint = fingerprint(tasks, settings.monitor.evaluation, settings.judge)
        self._not_before = 0.0

    def evaluate(self, learner: Learner, version: int) -> None:
        """Record missing figures of `version`, which the learner is, and of the champion."""
        if not self.wanted or time.monotonic() < self._not_before:
            return
        champion = self._ledger.versions.champion()
        found, before = self._figures(version), self._figures(champion.version)
        if before and found:
            return
        try:
            self._compare(learner, version, champion, before)
        except (NotEvaluated, torch.OutOfMemoryError) as error:
            reason = str(error) if isinstance(error, NotEvaluated) else "the GPU's memory is too small"
            _log.warning("version_not_evaluated", version=version, reason=reason)
            self._not_before = time.monotonic() + self._again_s

    def _compare(self, learner: Learner, version: int, champion: Version, before: tuple[Figure, ...]) -> None:
        started, record = time.perf_counter(), self._ledger.evaluations.record
        with learner.reading_alone(learner.actor):
            found = self._answers(learner.actor)
        if version == champion.version:
            return record(version, Evaluator.TRAINER, found)
        if not before:
            folder = self._settings.model.model_path if champion.is_base else champion.path / ACTOR
            try:
                actor = snapshot.actor_in(self._settings, folder)
            except EnvironmentRefused as error:
                raise NotEvaluated(str(error)) from error
            before = self._answers(actor)
            record(champion.version, Evaluator.TRAINER, before)
        verdict = gate_verdict(self._settings.gate, found, before)
        details = verdict.details(champion.version)
        reason = verdict.reason(champion.version)
        self._ledger.versions.note(version, VersionAction.EVALUATED, by="trainer", reason=reason, details=details)
        # Last: with these figures the version may be rejected or served at once.
        record(version, Evaluator.TRAINER, found)
        seconds = round(time.perf_counter() - started, 3)
        _log.info("version_evaluated", version=version, passed=verdict.passed, reason=reason, seconds=seconds)

    def _answers(self, actor: Actor) -> tuple[Figure, ...]:
        if self._held_out is None:
            return figures_of((), fingerprint=self._fingerprint, refusals=())
        return self._held_out.figures(actor)

    def _figures(self, version: int) -> tuple[Figure, ...]:
        return figures_on(self._ledger.evaluations.of(version, Evaluator.TRAINER), self._fingerprint)
