"""This file is `tuneloop finetune`: a fine-tuning job on a file, from its lines to the version that it makes."""

import contextlib
import hashlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from tuneloop.cli.both import service, start_child
from tuneloop.cli.options import (
    ConfigOption,
    JsonOption,
    SetOption,
    TenantOption,
    echo,
    open_to_group,
    operator_name,
    tell,
)
from tuneloop.shared.checkpoints import sync_folder
from tuneloop.shared.errors import EnvironmentRefused, FileRefused, JobRefused
from tuneloop.shared.experience import JobState
from tuneloop.shared.finetuning.job_plan import plan_job
from tuneloop.shared.finetuning.lines import check_file
from tuneloop.shared.job_marks import touch_committed
from tuneloop.shared.ledger.files import FILES, StoredFile
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.policies import OPEN, Job, JobDraft, JobEvent
from tuneloop.shared.ledger.storage.database import upgrade
from tuneloop.shared.operations.job_requests import MAX_SUFFIX, PURPOSE
from tuneloop.shared.settings.base_model import require_trainable
from tuneloop.shared.settings.loader import OVERRIDES_VARIABLE, read_settings
from tuneloop.shared.settings.settings import Settings, holds_secret

#: One line of so many is held out where no validation file is given.
_HELD_OUT = 10

#: Seconds between two looks, and those that a trainer gets to stop.
_LOOK_S, _STOP_S = 0.3, 120.0

_LAST_BYTES = 2000


def finetune(
    data: Annotated[Path, typer.Argument(metavar="DATA.jsonl", help="Conversations, or preferences: a JSON a line.")],
    config: ConfigOption,
    method: Annotated[
        Literal["sft", "dpo"], typer.Option(help="What is learnt: answers, or the better of two.")
    ] = "sft",
    epochs: Annotated[int | None, typer.Option(help="How often each line is learnt; auto without.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Answers, or pairs, of a step; auto without.")] = None,
    lr_multiplier: Annotated[float | None, typer.Option(help="Times algorithm.optimizer.lr; auto without.")] = None,
    suffix: Annotated[str | None, typer.Option(help="A part of the model's name.")] = None,
    validation: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Held out; without, the last tenth of the lines.")
    ] = None,
    tenant: TenantOption = "default",
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Fine-tune an adapter on a file, with the trainer that runs, or else with one of its own."""
    overrides = [*(set_ or ())]
    settings = read_settings(config, overrides).valid_settings()
    require_trainable(settings)
    open_to_group(settings)
    upgrade(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name)
    if suffix is not None and not 0 < len(suffix) <= MAX_SUFFIX:
        raise JobRefused(f"--suffix: has {len(suffix)} characters; write 1 to {MAX_SUFFIX}")
    asked = {"n_epochs": epochs, "batch_size": batch_size, "learning_rate_multiplier": lr_multiplier}
    given = {name: value for name, value in asked.items() if value is not None}
    began = time.monotonic()
    with closing(Ledger.of(settings)) as ledger:
        ledger.own(settings.project, settings.name)
        ledger.versions.ensure_base(settings.model.model_path.absolute())
        kind = "dpo" if method == "dpo" else "supervised"
        job = _create(settings, ledger, kind, given, data=data, validation=validation, suffix=suffix, tenant=tenant)
        if not for_programs:
            echo(f"{job.id}: {job.rows_in_all} lines in all, about {job.total_steps} steps")
        try:
            with _trainer(settings, ledger, config, overrides) as check:
                losses = _watch(ledger, job, check, quiet=for_programs)
        except KeyboardInterrupt:
            echo(f"{job.id} waits. To go on: tuneloop train --config {config}", err=True)
            raise typer.Exit(130) from None
        job = ledger.jobs.get(job.id)
    if job.state is not JobState.SUCCEEDED:
        raise JobRefused(f"{job.id} {job.state}" + (f": {job.error['message']}" if job.error else ""))
    seconds = round(time.monotonic() - began, 1)
    before, after = (losses[0], losses[-1]) if losses else (None, None)
    told: dict[str, object] = {"job": job.id, "model": job.name, "version": job.version, "steps": job.total_steps}
    told |= {"trained_tokens": job.trained_tokens, "loss_before": before, "loss_after": after, "seconds": seconds}
    loss = [] if before is None else [f"loss on the validation part: {before:.4f} before, {after:.4f} after"]
    made = f"version {job.version} after {job.total_steps} steps, {seconds:g} s: ask for it as {job.name}"
    tell(told, *loss, made, for_programs=for_programs)


def _create(
    settings: Settings,
    ledger: Ledger,
    method: str,
    asked: dict[str, Any],
    *,
    data: Path,
    validation: Path | None,
    suffix: str | None,
    tenant: str,
) -> Job:
    """A job that is queued, with its files. Raises FileRefused with the mistakes, JobRefused."""
    count, held_out = _count_lines(data, method), 0
    if validation is not None:
        _count_lines(validation, method)
    elif count > 1:
        held_out = max(1, count // _HELD_OUT)
    count, seed = count - held_out, settings.trainer.seed
    plan = plan_job(settings, method, asked, lines=count, seed=seed)
    training, beside = _keep(settings, ledger, data, slice(0, count), tenant), None
    if validation is not None:
        beside = _keep(settings, ledger, validation, slice(0, None), tenant)
    elif held_out:
        beside = _keep(settings, ledger, data, slice(count, None), tenant)
    job = ledger.jobs.create(
        JobDraft(
            tenant=tenant,
            model=settings.served_model_name,
            parent=0,
            options=plan.options,
            method=method,
            hyperparameters=plan.hyperparameters,
            seed=seed,
            suffix=suffix,
            training_file=training,
            validation_file=beside,
            rows_in_all=plan.rows_in_all,
            total_steps=plan.total_steps,
            by=operator_name(),
        )
    )
    with contextlib.suppress(JobRefused):  # An explorer may have looked at the lines by now.
        ledger.jobs.change(job.id, JobState.QUEUED, "Files validated, moving job to queued state")
    touch_committed(settings.job_dir)
    return job


def _count_lines(path: Path, method: str) -> int:
    found = check_file(path, method)
    if found.mistakes:
        raise FileRefused("\n".join(f"{path}:{each.number}: {each.message}" for each in found.mistakes))
    return found.lines


def _keep(settings: Settings, ledger: Ledger, path: Path, part: slice, tenant: str) -> str:
    """Keep some lines of a file as an upload is kept: on disk first, then in the ledger; its id. Raises FileRefused."""
    folder, file_id = settings.job_dir / FILES, f"file-{secrets.token_hex(12)}"
    digest, size = hashlib.sha256(), 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as source, (folder / file_id).open("xb") as target:
            for line in islice(filter(bytes.strip, source), part.start, part.stop):
                whole = line.rstrip(b"\r\n") + b"\n"
                digest.update(whole)
                size += target.write(whole)
            target.flush()
            os.fsync(target.fileno())
        sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            (folder / file_id).unlink()
        raise FileRefused(f"{folder / file_id}: {error.strerror}") from None
    ledger.files.add(
        StoredFile(
            id=file_id,
            tenant=tenant,
            purpose=PURPOSE,
            filename=path.name,
            bytes=size,
            sha256=digest.hexdigest(),
            created_at=0.0,
            created_by=operator_name(),
        )
    )
    return file_id


@contextmanager
def _trainer(
    settings: Settings, ledger: Ledger, config: Path, overrides: Sequence[str]
) -> Iterator[Callable[[], None]]:
    """Run a trainer meanwhile, unless one is alive; the yielded function raises if the started trainer has ended."""
    trainer = ledger.reports.facts(BatchRules.of(settings)).trainer
    if trainer is not None and trainer.up(ledger.transactions.time()):
        yield lambda: None
        return
    if any(holds_secret(override.partition("=")[0].strip()) for override in overrides):
        os.environ[OVERRIDES_VARIABLE] = json.dumps(list(overrides))
        overrides = ()
    with tempfile.TemporaryFile() as log:
        child = start_child(service("trainer", config, [*overrides, "mode=train"]), log)

        def require_alive() -> None:
            if (code := child.poll()) is not None:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
                last = log.read().decode(errors="replace").strip()
                raise EnvironmentRefused(f"the trainer has ended with code {code}; the job waits for another:\n{last}")

        try:
            yield require_alive
        finally:
            child.terminate()
            try:
                child.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _watch(ledger: Ledger, job: Job, check: Callable[[], None], *, quiet: bool) -> list[float]:
    losses: list[float] = []
    seen = 0
    shows_bar = sys.stderr.isatty() and not quiet
    columns = (TextColumn(job.id), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    with Progress(*columns, console=Console(stderr=True), disable=not shows_bar) as bar:
        task = bar.add_task("", total=max(1, job.total_steps), loss="")
        while True:
            state = ledger.jobs.get(job.id).state
            newest, before = list[JobEvent](), None
            while page := ledger.jobs.events(job.id, before=before, limit=100):
                newest += [each for each in page if each.id > seen]
                before = page[-1].id
                if before <= seen:
                    break
            for event in reversed(newest):
                seen, figures = event.id, event.data or {}
                if "full_valid_loss" in figures:
                    losses.append(figures["full_valid_loss"])
                if "train_loss" in figures:
                    bar.update(task, completed=figures["step"], loss=f"loss {figures['train_loss']:.4f}")
                if not quiet and (event.level != "info" or not shows_bar):
                    echo(event.message, err=shows_bar)
            if state not in OPEN:
                return losses
            check()
            time.sleep(_LOOK_S)
