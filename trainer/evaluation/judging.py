"""Who judges the replies of an evaluation: the answer itself, a function of the user's, or a model."""

from collections.abc import Iterator
from contextlib import contextmanager

from tuneloop.runner.errors import JudgeAway, JudgeFailed
from tuneloop.runner.judging.judge import Judge as ModelJudge
from tuneloop.runner.judging.rubric import Rubric
from tuneloop.runner.rewards.reply import Reply
from tuneloop.shared.errors import EnvironmentRefused, NotEvaluated
from tuneloop.shared.evaluation.tasks import Judge, Task, judge_of, without_reasoning
from tuneloop.shared.settings.feedback import JudgeSettings as JudgeSettings
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import reveal


@contextmanager
def judging(settings: Settings) -> Iterator[Judge]:
    """How replies are judged, for one evaluation.

    Raises EnvironmentRefused if the function, or the model's rubric, is not there.
    """
    known = judge_of(settings.monitor.evaluation)
    if known is not None:
        yield known
        return
    model = _model(settings.judge)
    try:
        yield _by(model)
    finally:
        model.close()


def _by(model: ModelJudge) -> Judge:
    def judge(task: Task, reply: str) -> float | None:
        candidate = Reply(text=without_reasoning(reply), messages=tuple(task.messages), expected=task.answer)
        try:
            return model.score(candidate).normalised
        except JudgeFailed:
            return None
        except JudgeAway as error:
            raise NotEvaluated(f"the judge is away: {error.reason}") from None

    return judge


def _model(options: JudgeSettings) -> ModelJudge:
    if options.url is None:
        raise EnvironmentRefused("monitor.evaluation.judge: model needs judge.url and judge.model: which model judges")
    rubric = Rubric(criteria=options.criteria, weights=options.weights, scale=options.scale)
    try:
        rubric = rubric if options.rubric is None else Rubric.load(options.rubric)
        return ModelJudge(
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
