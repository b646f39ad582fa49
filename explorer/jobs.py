"""Fine-tuning jobs, in the explorer that leads: files are checked, and `reinforcement` is run as a client of ours."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from random import Random
from statistics import fmean
from typing import Any, TypeVar

import httpx
import orjson
import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.tokens import JobClaims, TokenSigner
from tuneloop.shared.errors import (
    EngineError,
    FileRefused,
    JobRefused,
    LedgerUnavailable,
    PolicyRefused,
    RequestRefused,
    TuneloopError,
)
from tuneloop.shared.experience import JobState, State, VersionState, steady_clock
from tuneloop.shared.finetuning.graders import AskModel, ModelSample, check_grader, grade
from tuneloop.shared.finetuning.job_plan import plan_job
from tuneloop.shared.finetuning.lines import FileLine, LineIndex, check_file
from tuneloop.shared.job_marks import KEY, load_key, touch_committed
from tuneloop.shared.ledger.explorers import LEAD_S
from tuneloop.shared.ledger.files import FILES, PromptSample
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import Job
from tuneloop.shared.settings.policies import settings_of_policy
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: How often it is looked for jobs, at most, and for what became of the rows of a step, in seconds.
POLL_S = 1.0

#: The mistakes of a file that a job's error names.
_MISTAKES = 5

_BUG = "an internal error while the files were checked; it has been logged"


class LineChecks:
    """Looks for jobs in `validating_files`, and checks their files, one at a time: the smallest first."""

    def __init__(self, settings: Settings, ledger: Ledger, *, metrics: Metrics) -> None:
        self._settings, self._ledger, self._metrics = settings, ledger, metrics

    async def run(self) -> None:
        interval_s = min(self._settings.explorer.service_status_check_interval, POLL_S)
        await every(interval_s, self.turn, task="fine_tuning_files", metrics=self._metrics)

    async def turn(self) -> None:
        waiting = await asyncio.to_thread(self._ledger.jobs.open, (JobState.VALIDATING,))
        if not waiting:
            return
        files = {job.id: await asyncio.to_thread(self._ledger.files.find, job.training_file) for job in waiting}

        def size(job: Job) -> int:
            return file.bytes if (file := files[job.id]) is not None else 0

        for job in sorted(waiting, key=size):
            # Another explorer may decide by now; what two have checked is decided by the first.
            if await asyncio.to_thread(self._ledger.explorers.lead, self._settings.explorer_name) is None:
                return
            try:
                await asyncio.to_thread(self.check, job)
            except LedgerUnavailable:
                raise
            except JobRefused as error:  # it was cancelled meanwhile
                log.info("fine_tuning_job_not_checked", job=job.id, reason=str(error))
            except Exception:
                log.exception("fine_tuning_job_not_checked", job=job.id)
                bug = {"code": "server_error", "message": _BUG, "param": None}
                with suppress(JobRefused):
                    await asyncio.to_thread(self._fail, job, bug)

    def check(self, job: Job) -> None:
        """Check the files of a job: it is queued, or fails. Raises JobRefused where it is over by then."""
        lines = 0
        for field in ("validation_file", "training_file"):
            if (file_id := getattr(job, field)) is not None:
                lines, wrong = self._look_at(file_id, job.method)
                if wrong:
                    return self._fail(job, {"code": f"invalid_{field}", "message": wrong, "param": field})
        try:  # the plan was made for lines that were only counted: for as many it is the same
            plan = plan_job(self._settings, job.method, job.hyperparameters, lines=lines, seed=job.seed)
        except JobRefused as error:
            return self._fail(job, {"code": "invalid_value", "message": str(error), "param": "method"})
        message = f"Files validated ({lines} lines); the job is queued"
        self._ledger.jobs.change(job.id, JobState.QUEUED, message, **plan._asdict())
        with suppress(OSError):
            touch_committed(self._settings.job_dir)  # the trainer looks now
        log.info("fine_tuning_job_queued", job=job.id, lines=lines)

    def _look_at(self, file_id: str, method: str) -> tuple[int, str]:
        """How many lines a file has, and what is wrong with it."""
        if self._ledger.files.find(file_id) is None:
            return 0, f"{file_id} was deleted before its lines were checked"
        try:
            found = check_file(self._settings.job_dir / FILES / file_id, method)
        except OSError as error:
            return 0, f"{file_id} cannot be read: {error.strerror}"
        except FileRefused as error:
            return 0, f"{file_id}: {error}"
        told = [f"line {number}: {message}" for number, message in found.mistakes[:_MISTAKES]]
        if (more := len(found.mistakes) - len(told)) > 0:
            told.append(f"and {more} more, at least")
        return found.lines, "; ".join(told) or ("" if found.lines else f"{file_id} has no lines")

    def _fail(self, job: Job, error: dict[str, str | None]) -> None:
        self._ledger.jobs.change(job.id, JobState.FAILED, f"The job failed: {error['message']}", error=error)
        log.warning("fine_tuning_job_failed", job=job.id, code=error["code"])


_METHOD = "reinforcement"

#: Until a job is tried again whose service does not answer.
_PAUSE_S = 5.0

#: Requests of a job that are in flight at once, and the prompts of a validation file that are asked.
_CONCURRENT, _VALIDATED = 16, 256

#: Each request has a token of its own, which is of no use soon.
_TOKEN_S = 60.0

#: The rows of a step are committed at once. Those of a group whose rewards are all the same are dropped: a step is made
#: of the rest.
_BATCH_TIMEOUT_S = 2.0

#: The newest events of a job among which that of its last step is.
_EVENTS = 500

Wait = Callable[[float], Awaitable[bool]]


class ReinforcementJobs:
    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        *,
        metrics: Metrics,
        find_url: Callable[[], str],
        wait_until_taken: Wait,
    ) -> None:
        self.settings, self.ledger, self._metrics = settings, ledger, metrics
        self._find_url, self.wait_until_taken = find_url, wait_until_taken
        self._tokens = TokenSigner(load_key(settings.job_dir / KEY))
        self._driving: dict[str, asyncio.Task[None]] = {}
        #: Until when, by this process's clock, no other explorer may lead.
        self.leads_until = 0.0
        self._reasons: dict[str, str] = {}

    async def run(self) -> None:
        try:
            await every(POLL_S, self.turn, task="reinforcement", metrics=self._metrics)
        finally:
            await self._stop(self._driving)

    async def turn(self) -> None:
        found = await asyncio.to_thread(self.ledger.jobs.open, (JobState.QUEUED, JobState.RUNNING))
        jobs = {each.id: each for each in found if each.method == _METHOD}
        await self._stop(self._driving.keys() - jobs.keys())
        began, name = time.monotonic(), self.settings.explorer_name
        if not jobs or await asyncio.to_thread(self.ledger.explorers.lead, name) is None:
            await self._stop(self._driving)
            return
        self.leads_until = began + LEAD_S
        for job in jobs.values():
            if (task := self._driving.get(job.id)) is None or task.done():
                self._driving[job.id] = asyncio.create_task(self._drive(job))

    async def _stop(self, names: Collection[str]) -> None:
        """Cancel each once, and wait for it: cancelled twice, it would leave connections open."""
        tasks = {name: self._driving[name] for name in names}
        for task in tasks.values():
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks.values())
        for name in tasks:
            del self._driving[name]

    async def _drive(self, job: Job) -> None:
        def open_client(policy: int) -> httpx.AsyncClient:
            def sign(request: httpx.Request) -> httpx.Request:
                claims = JobClaims(job.id, job.tenant, policy, steady_clock() + _TOKEN_S)
                request.headers["authorization"] = f"Bearer {self._tokens.sign(claims)}"
                return request

            limits, timeout_s = httpx.Limits(max_connections=_CONCURRENT), self.settings.explorer.request_timeout
            return httpx.AsyncClient(base_url=self._find_url(), auth=sign, timeout=timeout_s, limits=limits)

        try:
            # The model's own name means the job's policy to the one, and the default policy to graders.
            async with open_client(job.policy) as client, open_client(0) as graders:
                await JobRun(job, self, client, graders).run()
        except (LedgerUnavailable, EngineError) as error:
            log.warning("reinforcement_put_off", job=job.id, reason=str(error))
            if isinstance(error, EngineError) and self._reasons.get(job.id) != (reason := str(error)):
                self._reasons[job.id] = reason
                await asyncio.to_thread(self.ledger.jobs.note, job.id, f"The job waits: {reason}", level="warn")
            await asyncio.sleep(_PAUSE_S)
        except (FileRefused, JobRefused, PolicyRefused, RequestRefused) as error:
            await self._fail(job, error)
        except Exception:
            log.exception("reinforcement_failed", job=job.id)
            await asyncio.sleep(_PAUSE_S)

    async def _fail(self, job: Job, error: TuneloopError) -> None:
        failed = {"code": "job_failed", "message": str(error), "param": None}
        change, message = self.ledger.jobs.change, f"The job failed: {error}"
        try:
            await asyncio.to_thread(change, job.id, JobState.FAILED, message, error=failed)
        except JobRefused:  # it was cancelled meanwhile
            log.info("reinforcement_not_failed", job=job.id, reason=str(error))


class JobRun:
    def __init__(
        self, job: Job, driver: ReinforcementJobs, client: httpx.AsyncClient, graders: httpx.AsyncClient
    ) -> None:
        self._job, self._driver, self._client, self._ask_model = job, driver, client, asking(graders)
        self._settings, self._ledger, self._wait = driver.settings, driver.ledger, driver.wait_until_taken
        self._slots, self._order = asyncio.Semaphore(_CONCURRENT), (-1, list[int]())
        self._grader, self._asked = check_grader(job.grader), dict(job.hyperparameters)
        self._line = self._ledger.versions.of(job.policy)
        self._refused: dict[int, str] = {}

    async def run(self) -> None:
        """Do its steps. Raises EngineError and LedgerUnavailable where it may go on later, else others."""
        job, ledger = self._job, self._ledger
        self._lines = await self._index(job.training_file)
        policy = await asyncio.to_thread(ledger.policies.get, job.policy)
        options = {"buffer.batch_timeout": _BATCH_TIMEOUT_S} | policy.settings
        if options != policy.settings:
            await asyncio.to_thread(ledger.policies.set_options, job.policy, options)
        self._samples = settings_of_policy(self._settings, options).buffer.group_size
        if job.state is JobState.QUEUED:
            await asyncio.to_thread(ledger.jobs.change, job.id, JobState.RUNNING, "Fine-tuning job started")
        events = await asyncio.to_thread(ledger.jobs.events, job.id, limit=_EVENTS)
        done: dict[str, Any] = {"step": 0, "next_prompt": 0, "trained_tokens": 0}
        done |= next((each.data for each in events if each.data and "next_prompt" in each.data), {})
        for step in range(done["step"] + 1, job.total_steps + 1):
            tasks, rewards, place = await self._sample(done["next_prompt"])
            tokens, version = await self._learn(tasks)
            mean, tokens = fmean(rewards), tokens + done["trained_tokens"]
            done = {"step": step, "train_mean_reward": mean, "next_prompt": place, "trained_tokens": tokens}
            done |= {"total_steps": job.total_steps, "version": version}
            message, is_due = f"Step {step}/{job.total_steps}: train mean reward={mean:.4f}", step == job.total_steps
            if job.validation_file and (is_due or step % self._asked["eval_interval"] == 0):
                done["valid_mean_reward"] = valid = await self._validate(job.validation_file)
                message += f", validation mean reward={valid:.4f}"
            await asyncio.to_thread(ledger.jobs.note, job.id, message, data=done)
        if (champion := await asyncio.to_thread(self._line.champion)).begins:
            raise JobRefused("no step changed the model: the samples of each prompt always had the same reward")
        ends = {"version": champion.version, "trained_tokens": done["trained_tokens"]}
        message = "The job has successfully completed"
        await asyncio.to_thread(ledger.jobs.change, job.id, JobState.SUCCEEDED, message, **ends)

    async def _index(self, file_id: str) -> LineIndex:
        try:
            index = await asyncio.to_thread(LineIndex.of, self._settings.job_dir / FILES / file_id)
        except OSError as error:
            raise FileRefused(f"{file_id} cannot be read: {error.strerror}") from None
        if not index.lines:
            raise FileRefused(f"{file_id} has no lines any more")
        return index

    def _task(self, place: int) -> tuple[int, str]:
        epoch, at = divmod(place, self._lines.lines)
        if self._order[0] != epoch:
            self._order = epoch, [*range(1, self._lines.lines + 1)]
            Random(f"{self._job.seed}:{epoch}").shuffle(self._order[1])
        number = self._order[1][at]
        return number, f"{self._job.training_file}:{number}:{self._job.id}:{epoch}"

    async def _sample(self, place: int) -> tuple[list[str], list[float], int]:
        """Have a step's prompts answered and rated: tasks, rewards, the next place. Raises RequestRefused."""
        tasks, rewards = list[str](), list[float]()
        while len(tasks) < self._asked["batch_size"]:
            if len(self._refused) == self._lines.lines:
                raise RequestRefused(f"all prompts were refused; the last one: {[*self._refused.values()][-1]}")
            if not await self._wait(_PAUSE_S):
                raise LedgerUnavailable("what was acknowledged is not in the database yet")
            chosen = [self._task(place + each) for each in range(self._asked["batch_size"] - len(tasks))]
            place += len(chosen)
            names = [task for _, task in chosen]
            numbers = {number for number, _ in chosen}
            read = self._lines.read([each - 1 for each in numbers], _METHOD)
            lines = {line.number: line for line in await asyncio.to_thread(list, read)}
            self._refused |= dict.fromkeys(numbers - lines.keys(), "its line was erased")
            there = await asyncio.to_thread(self._ledger.files.samples, self._job.tenant, names)
            asked = [(task, lines[number]) for number, task in chosen if number in lines]
            found = await gather(*(self._ask_all(line, task, there) for task, line in asked))
            for (task, _), rated in zip(asked, found, strict=True):
                tasks += [task] if rated else []
                rewards += rated
        return tasks, rewards, place

    async def _ask_all(self, line: FileLine, task: str, there: Sequence[PromptSample]) -> list[float]:
        """The rewards of the samples of a prompt; none where it is refused. What is there is not asked again."""
        if line.number in self._refused:
            return []
        before = {each.run_id: each for each in reversed(there) if each.task_id == task}

        async def ask(run_id: str) -> float:
            if (known := before.get(run_id)) is not None and known.reward is not None:
                return known.reward
            if known is None:
                labels = {"tuneloop_task_id": task, "tuneloop_run_id": run_id}
                msg_id, sample = await self._ask(line, metadata=labels)
            else:
                tools = orjson.loads(known.tool_calls or b"[]")
                msg_id, sample = known.msg_id, ModelSample(text=known.text, tools=tools, item=line.item)
            reward = (await grade(self._grader, sample, self._ask_model)).reward
            rated = {"msg_ids": [msg_id], "reward": reward, "idempotency_key": f"{task}/{run_id}"}
            if "reward" in (await post(self._client, "/feedback", rated)).get("not_counted", ()):
                raise JobRefused(
                    "reward.weights: the metric `reward` has none, so that what graders say counts nothing"
                )
            return reward

        try:
            return await gather(*(ask(str(each)) for each in range(self._samples)))
        except RequestRefused as error:
            self._refused[line.number] = str(error)
            warn = f"Line {line.number} of the training file is left out: {error}"
            await asyncio.to_thread(self._ledger.jobs.note, self._job.id, warn, level="warn")
            return []

    async def _ask(self, line: FileLine, **more: Any) -> tuple[str, ModelSample]:
        messages = [{name: each[name] for name in each if name != "weight"} for each in line.messages]
        body: dict[str, Any] = {"model": self._settings.served_model_name, "messages": messages, "temperature": 1.0}
        if line.tools:
            body["tools"] = line.tools
        if (effort := self._asked.get("reasoning_effort", "default")) != "default":
            body["reasoning_effort"] = effort
        async with self._slots:
            if time.monotonic() >= self._driver.leads_until:
                raise LedgerUnavailable("another explorer may lead by now")
            answer = await post(self._client, "/v1/chat/completions", body | more)
        said = answer["choices"][0]["message"]
        sample = ModelSample(text=said.get("content") or "", tools=said.get("tool_calls") or [], item=line.item)
        return answer["id"], sample

    async def _learn(self, tasks: Sequence[str]) -> tuple[int, int | None]:
        """Release a step's rows, and wait until a version that learnt from them answers: its tokens, and its number."""
        has_committed = False
        while True:
            rows = await asyncio.to_thread(self._ledger.files.samples, self._job.tenant, tasks)
            rows = await asyncio.to_thread(self._ledger.files.drop_repeated, rows)
            states = {row.state for row in rows}
            if not rows and has_committed:  # all that was acknowledged is in the database by then
                raise JobRefused("nothing is recorded of this tenant's replies, so that there is nothing to learn from")
            if not rows or states & {State.RECORDED, State.REWARDED}:
                await post(self._client, "/commit", {"task_ids": [*tasks]})
                has_committed = True
            elif not states & {State.COMMITTED, State.LEASED}:
                break
            await asyncio.sleep(POLL_S)
        trained = [row for row in rows if row.trained_version is not None]
        version = max((row.trained_version or 0 for row in trained), default=None)
        while version is not None:
            found = await asyncio.to_thread(self._line.get, version)
            if found is None or found.state not in {VersionState.CANDIDATE, VersionState.CANARY}:
                break
            await asyncio.sleep(POLL_S)
        return sum(row.completion_tokens for row in trained), version

    async def _validate(self, file_id: str) -> float:
        """The mean reward over prompts of the validation file, none recorded; a refused one is worth nothing."""
        index = await self._index(file_id)
        chosen = range(0, index.lines, -(-index.lines // _VALIDATED))

        async def score(line: FileLine) -> float:
            try:
                _, sample = await self._ask(line, store=False)
            except RequestRefused:
                return 0.0
            return (await grade(self._grader, sample, self._ask_model)).reward

        lines = await asyncio.to_thread(list, index.read(chosen, _METHOD))
        return fmean(
            await gather(*(score(line) for line in lines for _ in range(self._asked["eval_samples"]))) or [0.0]
        )


#: The answers to a request that will never do. To others the same request may get another answer in a moment.
_REFUSALS = {400, 413, 422}

_T = TypeVar("_T")


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Raises JobRefused for a model that there is not, RequestRefused, and EngineError."""
    try:
        answer = await client.post(path, json=body)
        found = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise EngineError(f"the service does not answer: {type(error).__name__}") from None
    if answer.status_code == 200:
        return dict(found)
    refusal = found.get("error") or {}
    message = str(refusal.get("message"))
    if refusal.get("code") == "model_not_found":
        raise JobRefused(message)
    if answer.status_code in _REFUSALS:
        raise RequestRefused(message, status=answer.status_code)
    raise EngineError(message)


async def gather(*parts: Coroutine[Any, Any, _T]) -> list[_T]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in parts]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [each.result() for each in tasks]


def asking(client: httpx.AsyncClient) -> AskModel:
    async def ask(body: dict[str, Any]) -> str:
        answer = await post(client, "/v1/chat/completions", body | {"store": False})
        return answer["choices"][0]["message"].get("content") or ""

    return ask
