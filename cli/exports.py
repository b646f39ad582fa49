"""This file is `tuneloop export`: rows of the ledger, in the formats that TRL and Hugging Face datasets read."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple, assert_never

import typer

from tuneloop.cli import export_formats
from tuneloop.cli.export_formats import Format, Row
from tuneloop.cli.files import Draft, in_turn
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, TenantOption, echo, echo_json, with_progress
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import Kind, State
from tuneloop.shared.ledger.export import PAGE, ExportedReply, Selection
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.privacy.vocabulary import Vocabulary
from tuneloop.shared.settings.loader import read_settings


class ExportRequest(NamedTuple):
    """What to export: rows of the selection; `everything`: also replies cut off or without a reward.

    `min_reward` leaves out lower rewards, `margin` pairs of replies whose rewards are closer. By the `vocabulary`
    the reasoning of replies is read from their tokens.
    """

    format: Format
    selection: Selection
    min_reward: float | None = None
    margin: float = 0.0
    everything: bool = False
    vocabulary: Vocabulary | None = None


class ExportResult(NamedTuple):
    """The rows in the file, and how many were left out, by the reason."""

    rows: int
    left_out: Counter[str]


def export(ledger: Ledger, request: ExportRequest, path: Path) -> ExportResult:
    """Write the file, and record it in the ledger so that an erasure reaches it."""
    path = path.absolute()
    while True:
        erased = ledger.exports.erasures_so_far(request.selection.tenant)
        left_out: Counter[str] = Counter()
        with Draft(path, request.format) as draft:
            for row in with_progress(_rows(ledger, request), f"writing {path.name}"):
                if isinstance(row, str):
                    left_out[row] += 1
                else:
                    draft.write(row)
            written = False

            def publish(draft: Draft = draft) -> None:
                nonlocal written
                draft.publish()
                written = True

            try:
                with in_turn(path):  # before the transaction, in which nobody waits for the erasure of a large file
                    if ledger.exports.record_file(
                        str(path), request.format, draft.rows, of=request.selection, unless=erased, publish=publish
                    ):
                        return ExportResult(draft.rows, left_out)
            except BaseException:
                if written:  # no erasure would reach a file that the ledger does not list
                    path.unlink(missing_ok=True)
                raise


def _rows(ledger: Ledger, request: ExportRequest) -> Iterator[Row | str]:
    match request.format:
        case Format.SFT:
            for reply in _replies(ledger, request):
                yield export_formats.sft(
                    reply,
                    min_reward=request.min_reward,
                    everything=request.everything,
                    vocabulary=request.vocabulary,
                )
        case Format.KTO:
            for reply in _replies(ledger, request):
                yield export_formats.kto(reply, everything=request.everything)
        case Format.DPO:
            yield from _preferred_pairs(ledger, request)
            yield from _pairs_by_reward(ledger, request)
        case Format.EXPERIENCES:
            for page in ledger.exports.replies(request.selection, everything=True):
                for reply in page:
                    low = request.min_reward is not None and (reply.reward is None or reply.reward < request.min_reward)
                    yield "too low a reward" if low else export_formats.experience(reply)
        case never:
            assert_never(never)


def _replies(ledger: Ledger, request: ExportRequest) -> Iterator[ExportedReply]:
    for page in ledger.exports.replies(request.selection):
        yield from page


def _preferred_pairs(ledger: Ledger, request: ExportRequest) -> Iterator[Row | str]:
    """Pairs by an edited answer, or by a preference."""
    for page in ledger.exports.replies(request.selection):
        msg_ids = {event.other_msg_id for reply in page for event in reply.events if event.kind == Kind.PREFERENCE}
        others: dict[tuple[str, int | None], ExportedReply] = {}  # by msg_id and choice; without a choice, the first
        for reply in ledger.exports.replies_named(request.selection.tenant, msg_ids):
            others[reply.msg_id, reply.choice] = reply
            others.setdefault((reply.msg_id, None), reply)
        for reply in page:
            if export_formats.latest_edit(reply) is not None:
                yield export_formats.dpo_of_edit(reply)
            for name in dict.fromkeys(
                (event.other_msg_id, event.other_choice) for event in export_formats.current_preferences(reply)
            ):
                if (other := others.get(name)) is None:
                    yield "the other reply is not in the ledger"
                    continue
                event = export_formats.preference_between(reply, other)
                if event is not None and event.msg_id == reply.msg_id and event.choice in (None, reply.choice):
                    yield export_formats.dpo_of_two(reply, other, source="preference", events=[event])


def _pairs_by_reward(ledger: Ledger, request: ExportRequest) -> Iterator[Row | str]:
    ranked = list(ledger.exports.ranked_replies(request.selection, export_formats.digest))
    pairs = export_formats.best_and_worst(ranked, margin=request.margin)
    while page := list(islice(pairs, PAGE)):
        replies = ledger.exports.replies_by_id({each for pair in page for each in pair})
        for best, worst in ((replies.get(best), replies.get(worst)) for best, worst in page):
            if best is None or worst is None:
                continue
            if request.min_reward is not None and (best.reward or 0.0) < request.min_reward:
                yield "too low a reward"
            elif export_formats.preference_between(best, worst) is not None:
                yield "paired by a preference already"
            else:
                events = [*best.events, *worst.events]
                yield export_formats.dpo_of_two(best, worst, source="reward", events=events)


def _timestamp(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a time; write 2026-01-31 or 2026-01-31T12:00:00+01:00") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def export_(
    config: ConfigOption,
    format: Annotated[Format, typer.Option(help="What the file is for.")],
    to: Annotated[Path, typer.Option(metavar="FILE", help="A .jsonl or .parquet file; an existing one is replaced.")],
    state: Annotated[list[State] | None, typer.Option(help="Only rows in this state; may be repeated.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rewards as high; an edited answer needs none.")] = None,
    margin: Annotated[float, typer.Option(help="dpo: the least difference of the rewards of two replies.")] = 0.0,
    since: Annotated[
        float | None, typer.Option(parser=_timestamp, metavar="ISO", help="Sampled then or later.")
    ] = None,
    until: Annotated[
        float | None, typer.Option(parser=_timestamp, metavar="ISO", help="Sampled then or before.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only this task_id.")] = None,
    all: Annotated[bool, typer.Option("--all", help="sft, kto: also replies cut off; sft: without a reward.")] = False,
    tenant: TenantOption = "default",
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Write replies to a file, for SFT, DPO, KTO, or with everything that the ledger holds about them."""
    if format is Format.KTO and min_reward is not None:
        raise typer.BadParameter("kto goes by thumbs, not by rewards", param_hint="--min-reward")
    selection = Selection(tenant, tuple(state or ()), task, since, until)
    settings = read_settings(config, set_ or ()).valid_settings()
    vocabulary = Vocabulary.load(settings.model.model_path)
    request = ExportRequest(format, selection, min_reward, margin, all, vocabulary)
    schema = settings.buffer.trainer_input.experience_buffer.name
    present, newest = revisions.current(settings.database_url, schema=schema), revisions.newest()
    if present is None:
        raise EnvironmentRefused("the database is empty: nothing has been recorded with these settings")
    if present != newest:
        raise EnvironmentRefused(f"the database has schema {present}, not {newest}: run tuneloop db upgrade")
    with closing(Ledger.of(settings)) as ledger:
        result = export(ledger, request, to)
    if for_programs:
        echo_json({"file": str(to), "rows": result.rows, "left_out": dict(sorted(result.left_out.items()))})
        return
    echo(f"{to}: {result.rows} rows")
    for reason, count in sorted(result.left_out.items()):
        echo(f"  left out {count}: {reason}")
