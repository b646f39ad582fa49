"""Makes a fine-tuning job of what OpenAI's API takes to create one, and describes jobs, a line each."""

import re
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from tuneloop.shared.errors import JobRefused, PolicyRefused, RequestRefused
from tuneloop.shared.experience import JobState
from tuneloop.shared.finetuning.graders import check_grader
from tuneloop.shared.finetuning.job_plan import plan_job
from tuneloop.shared.finetuning.lines import METHODS
from tuneloop.shared.ledger.files import FILES
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.policies import DEFAULT, Job, JobDraft
from tuneloop.shared.operations.policy_report import require_adapters
from tuneloop.shared.settings.policies import settings_of_policy
from tuneloop.shared.settings.settings import Settings

#: Of a job's suffix, in characters; of a seed; and how many jobs of a tenant may be open at once.
MAX_SUFFIX, MAX_SEED, MOST_OPEN = 64, 2**31 - 1, 50

PURPOSE = "fine-tune"

_FILES = ("training_file", "validation_file")
_FIELDS = {"model", *_FILES, "suffix", "seed", "metadata", "method", "hyperparameters", "integrations"}

_PIECE_BYTES = 1 << 20


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job in the list. Times are seconds since 1970; `loss` describes its last step or reward."""

    id: str
    tenant: str
    model: str
    fine_tuned_model: str | None
    method: str
    state: JobState
    step: int
    total_steps: int
    loss: float | None
    created_at: float
    error: str | None


def create_job(settings: Settings, ledger: Ledger, body: Mapping[str, Any], *, tenant: str, by: str) -> Job:
    """A new job, of the fields of OpenAI's request. Raises RequestRefused for what cannot be, with the field."""
    try:
        require_adapters(settings)
    except PolicyRefused as error:
        raise RequestRefused(str(error), code="model_not_trainable", param="model") from None
    if unknown := sorted(body.keys() - _FIELDS):
        raise RequestRefused(f"unknown field {unknown[0]!r}", code="unknown_parameter", param=unknown[0])
    for field in ("model", "training_file"):
        if body.get(field) is None:
            raise RequestRefused(f"{field} is missing", code="missing_required_parameter", param=field)
    for field in ("model", *_FILES, "suffix"):
        _require(body.get(field), str, field, "a string")
    _require(body.get("seed"), int, "seed", "an integer")
    if body.get("integrations"):
        reason = "no integration is served: the trainer's curves are TensorBoard's"
        raise RequestRefused(reason, code="unsupported_parameter", param="integrations")
    suffix, seed = body.get("suffix") or None, body.get("seed")
    if suffix is not None and (len(suffix) > MAX_SUFFIX or not suffix.isprintable() or not suffix.isascii()):
        reason = f"suffix must be at most {MAX_SUFFIX} printable ASCII characters"
        raise RequestRefused(reason, code="invalid_value", param="suffix")
    seed = time.time_ns() % MAX_SEED if seed is None else seed
    if not 0 <= seed <= MAX_SEED:
        raise RequestRefused(f"seed must be from 0 to {MAX_SEED}", code="invalid_value", param="seed")
    method, asked = _method_of(body)
    lines = [_lines_of(settings, ledger, body.get(field), tenant, field) for field in _FILES]
    if sum(each.tenant == tenant for each in ledger.jobs.open()) >= MOST_OPEN:
        reason = f"{MOST_OPEN} jobs are not over: wait for one, or cancel one"
        raise RequestRefused(reason, status=429, code="too_many_jobs")
    parent, of_parent = _parent_of(settings, ledger, body["model"], tenant)
    try:
        grader = None
        if method == "reinforcement":
            grader = check_grader((body["method"].get(method) or {}).get("grader"))
        plan = plan_job(settings, method, asked, lines=max(1, lines[0]), seed=seed)
        settings_of_policy(settings, of_parent | plan.options)
        draft = JobDraft(
            tenant=tenant,
            model=body["model"],
            base=settings.served_model_name,
            parent=parent,
            options=of_parent | plan.options,
            method=method,
            hyperparameters=plan.hyperparameters,
            grader=grader,
            seed=seed,
            suffix=suffix,
            metadata=dict(body.get("metadata") or {}),
            training_file=body["training_file"],
            validation_file=body.get("validation_file"),
            rows_in_all=plan.rows_in_all,
            total_steps=plan.total_steps,
            by=by,
        )
        return ledger.jobs.create(draft)
    except (JobRefused, PolicyRefused) as error:  # its sentence begins with the place
        place = re.split(r"[: ]", str(error), maxsplit=1)[0]
        within = "" if place.startswith("grader") else "hyperparameters."
        param = f"method.{method}.{within}{place}" if within == "" or place in asked else "method"
        raise RequestRefused(str(error), code="invalid_value", param=param) from None


def list_jobs(ledger: Ledger, tenant: str | None = None, *, limit: int = 50) -> list[JobRow]:
    return [report_job(ledger, job) for job in islice(ledger.jobs.page(tenant), limit)]


def report_job(ledger: Ledger, job: Job) -> JobRow:
    told = [each.data or {} for each in ledger.jobs.progress(job.id)]
    losses = (data.get(name) for data in told for name in ("train_loss", "train_mean_reward") if name in data)
    return JobRow(
        id=job.id,
        tenant=job.tenant,
        model=job.model,
        fine_tuned_model=job.name if job.state is JobState.SUCCEEDED else None,
        method=job.method,
        state=job.state,
        step=max((data.get("step", 0) for data in told), default=0),
        total_steps=job.total_steps,
        loss=next(losses, None),
        created_at=job.created_at,
        error=None if job.error is None else str(job.error.get("message")),
    )


def _require(value: object, kind: type, field: str, wanted: str) -> None:
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise RequestRefused(f"{field} must be {wanted}", code="invalid_type", param=field)


def _method_of(body: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    method = body.get("method")
    _require(method, dict, "method", "an object")
    kind = "supervised" if method is None else method.get("type")
    if not isinstance(kind, str) or kind not in METHODS:
        reason = f"method.type must be one of {', '.join(METHODS)}"
        raise RequestRefused(reason, code="invalid_value", param="method.type")
    config = (method or {}).get(kind)
    _require(config, dict, f"method.{kind}", "an object")
    if (config or {}).get("response_format") is not None:
        reason = "response_format is not served: replies are sampled as they come"
        raise RequestRefused(reason, code="unsupported_parameter", param=f"method.{kind}.response_format")
    asked = (config or {}).get("hyperparameters", body.get("hyperparameters"))
    _require(asked, dict, "hyperparameters", "an object")
    return kind, {name: value for name, value in (asked or {}).items() if value is not None}


def _lines_of(settings: Settings, ledger: Ledger, file_id: str | None, tenant: str, field: str) -> int:
    """How many lines that are not blank a file of a tenant has; 0 where none is named. Raises RequestRefused."""
    if file_id is None:
        return 0
    stored = ledger.files.find(file_id, tenant)
    if stored is None:
        raise RequestRefused(f"there is no file {file_id}", status=404, code="file_not_found", param=field)
    if stored.purpose != PURPOSE:
        reason = f"the purpose of {file_id} is {stored.purpose}, and must be {PURPOSE}"
        raise RequestRefused(reason, code="invalid_file_purpose", param=field)
    try:
        return count_lines(settings.job_dir / FILES / file_id)
    except OSError as error:
        reason = f"{file_id} cannot be read: {error.strerror}"
        raise RequestRefused(reason, status=503, code="file_unreadable", param=field, retry_after_s=5.0) from None


def count_lines(path: Path) -> int:
    """How many lines of a file are not blank, without reading it whole into memory. Raises OSError."""
    count, is_blank = 0, True
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            first, *more = piece.split(b"\n")
            is_blank = is_blank and not first.strip()
            for each in more:
                count += not is_blank
                is_blank = not each.strip()
    return count + (not is_blank)


def _parent_of(settings: Settings, ledger: Ledger, model: str, tenant: str) -> tuple[int, dict[str, Any]]:
    """The version that a job of a model starts from, and its policy's adapter options; raises RequestRefused.

    The model's own name is the base model, `name@version` that version, a policy's name its champion, `ft:…` that
    job's.
    """
    own_names = {settings.served_model_name, *settings.model.aliases}
    name, at, number = model.rpartition("@")
    pinned = int(number) if at and number.isascii() and number.isdigit() and len(number) <= 9 else None
    try:
        if model in own_names:
            return 0, {}
        if (job := ledger.jobs.of_model(model, tenant)) is not None:
            found = ledger.jobs.models().get(job.policy)
            if found is None or model not in found.versions:
                reason = "its model was deleted" if found is None else f"it is {job.state}"
                raise PolicyRefused(f"{model}: the fine-tuning job {job.id} has no such version: {reason}")
            parent, policy = found.versions[model], job.policy
        elif pinned is not None:
            policy = DEFAULT if name in own_names else ledger.policies.find(name, tenant).id
            version = ledger.versions.get(pinned)
            if version is None or version.policy != policy:
                raise PolicyRefused(f"{name} has no version {pinned}")
            parent = pinned
        else:
            policy = ledger.policies.find(model, tenant).id
            if policy in ledger.jobs.models():
                raise PolicyRefused(f"{model} is a fine-tuning job: name the model that it made")
            parent = ledger.versions.of(policy).champion().version
    except PolicyRefused as error:
        raise RequestRefused(f"no such model to train: {error}", code="model_not_found", param="model") from None
    its = ledger.policies.get(policy).settings
    return parent, {option: value for option, value in its.items() if option.startswith("model.lora.")}
