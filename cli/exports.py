"""This file is `tuneloop export`: rows of the ledger, in the formats that TRL and Hugging Face datasets read."""

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple, assert_never

import typer

from tuneloop.cli import export_formats
from tuneloop.cli.export_formats import Format, Row
from tuneloop.cli.files import Draft, in_turn
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, echo_json
from tuneloop.cli.progress import with_progress
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
            with in_turn(path):  # before the transaction, in which nobody waits for the erasure of a large file
                published = _publish(ledger, request, draft, path, unless=erased)
            if published:
                return ExportResult(draft.rows, left_out)


def _publish(ledger: Ledger, request: ExportRequest, draft: Draft, path: Path, *, unless: object) -> bool:
    published = False

    def publish() -> None:
        nonlocal published
        draft.publish()
        published = True

    try:
        return ledger.exports.record_file(
            str(path), request.format, draft.rows, of=request.selection, unless=unless, publish=publish
        )
    except BaseException:
        # No erasure would reach a file that the ledger does not list.
        if published:
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
            ranked_replies = list(ledger.exports.ranked_replies(request.selection, export_formats.digest))
            for pairs in _in_pages(export_formats.best_and_worst(ranked_replies, margin=request.margin)):
                replies = ledger.exports.replies_by_id({each for pair in pairs for each in pair})
                for best, worst in pairs:
                    if best in replies and worst in replies:
                        yield _pair_by_reward(replies[best], replies[worst], request)
        case Format.EXPERIENCES:
            for page in ledger.exports.replies(request.selection, everything=True):
                yield from (_experience(reply, request) for reply in page)
        case never:
            assert_never(never)


def _replies(ledger: Ledger, request: ExportRequest) -> Iterator[ExportedReply]:
    for page in ledger.exports.replies(request.selection):
        yield from page


def _experience(reply: ExportedReply, request: ExportRequest) -> Row | str:
    if request.min_reward is not None and (reply.reward is None or reply.reward < request.min_reward):
        return "too low a reward"
    return export_formats.experience(reply)


def _preferred_pairs(ledger: Ledger, request: ExportRequest) -> Iterator[Row | str]:
    """Pairs by an edited answer, or by a preference."""
    for page in ledger.exports.replies(request.selection):
        others = _other_replies(ledger, request, page)
        for reply in page:
            if export_formats.latest_edit(reply) is not None:
                yield export_formats.dpo_of_edit(reply)
            for name in dict.fromkeys(
                (event.other_msg_id, event.other_choice) for event in export_formats.current_preferences(reply)
            ):
                if (other := others.get(name)) is None:
                    yield "the other reply is not in the ledger"
                elif _is_better(reply, other):
                    event = export_formats.preference_between(reply, other)
                    yield export_formats.dpo_of_two(reply, other, source="preference", events=[event])


def _other_replies(
    ledger: Ledger, request: ExportRequest, page: Iterable[ExportedReply]
) -> dict[tuple[str, int | None], ExportedReply]:
    """The rejected replies of the page's preferences, by msg_id and choice; without a choice, the first."""
    msg_ids = {event.other_msg_id for reply in page for event in reply.events if event.kind == Kind.PREFERENCE}
    found: dict[tuple[str, int | None], ExportedReply] = {}
    for reply in ledger.exports.replies_named(request.selection.tenant, msg_ids):
        found[reply.msg_id, reply.choice] = reply
        found.setdefault((reply.msg_id, None), reply)
    return found


def _is_better(reply: ExportedReply, other: ExportedReply) -> bool:
    last = export_formats.preference_between(reply, other)
    return last is not None and last.msg_id == reply.msg_id and last.choice in (None, reply.choice)


def _pair_by_reward(best: ExportedReply, worst: ExportedReply, request: ExportRequest) -> Row | str:
    if request.min_reward is not None and (best.reward or 0.0) < request.min_reward:
        return "too low a reward"
    if export_formats.preference_between(best, worst) is not None:
        return "paired by a preference already"
    return export_formats.dpo_of_two(best, worst, source="reward", events=[*best.events, *worst.events])


def _in_pages(pairs: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    page: list[tuple[int, int]] = []
    for pair in pairs:
        page.append(pair)
        if len(page) == PAGE:
            yield page
            page = []
    if page:
        yield page


def _timestamp(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a time; write 2026-01-31 or 2026-01-31T12:00:00+01:00") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_Moment = float | None


_Tenant = Annotated[str, typer.Option(help="Whose replies; of imported conversations, whose they become.")]


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
    tenant: _Tenant = "default",
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
    ledger = Ledger.of(settings)
    try:
        result = export(ledger, request, to)
    finally:
        ledger.close()
    if for_programs:
        echo_json({"file": str(to), "rows": result.rows, "left_out": dict(sorted(result.left_out.items()))})
        return
    echo(f"{to}: {result.rows} rows")
    for reason, count in sorted(result.left_out.items()):
        echo(f"  left out {count}: {reason}")
