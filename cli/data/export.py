"""Writes what the ledger holds to a file, in the formats that TRL and Hugging Face datasets read."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, assert_never

from tuneloop.cli.data import export_formats
from tuneloop.cli.data.export_formats import Format, Row
from tuneloop.cli.data.files import Draft
from tuneloop.shared.experience import Kind
from tuneloop.shared.ledger.export import PAGE, Reply, Selection
from tuneloop.shared.ledger.ledger import Ledger


class Wish(NamedTuple):
    """What is to be in the file: rows of the selection; `everything`: also replies cut off or without a reward.

    `min_reward` leaves out lower rewards, `margin` pairs of replies whose rewards are closer.
    """

    format: Format
    selection: Selection
    min_reward: float | None = None
    margin: float = 0.0
    everything: bool = False


class Exported(NamedTuple):
    """What came of it: the rows in the file, and how many were left out, by the reason."""

    rows: int
    left_out: Counter[str]


def export(ledger: Ledger, wish: Wish, path: Path) -> Exported:
    """Write the file, and remember it in the ledger so that a deletion reaches it."""
    path = path.absolute()
    while True:
        erased = ledger.exports.erasures_so_far(wish.selection.tenant)
        left_out: Counter[str] = Counter()
        with Draft(path, wish.format) as draft:
            for made in _rows(ledger, wish):
                if isinstance(made, str):
                    left_out[made] += 1
                else:
                    draft.write(made)
            if _exported(ledger, wish, draft, path, unless=erased):
                return Exported(draft.rows, left_out)


def _exported(ledger: Ledger, wish: Wish, draft: Draft, path: Path, *, unless: object) -> bool:
    published = False

    def publish() -> None:
        nonlocal published
        draft.publish()
        published = True

    try:
        return ledger.exports.record_file(
            str(path), wish.format, draft.rows, of=wish.selection, unless=unless, publish=publish
        )
    except BaseException:
        # No deletion would find a file that the ledger does not know.
        if published:
            path.unlink(missing_ok=True)
        raise


def _rows(ledger: Ledger, wish: Wish) -> Iterator[Row | str]:
    match wish.format:
        case Format.SFT:
            for reply in _replies(ledger, wish):
                yield export_formats.sft(reply, min_reward=wish.min_reward, everything=wish.everything)
        case Format.KTO:
            for reply in _replies(ledger, wish):
                yield export_formats.kto(reply, everything=wish.everything)
        case Format.DPO:
            yield from _said_to_be_better(ledger, wish)
            yield from _better_rewarded(ledger, wish)
        case Format.EXPERIENCES:
            for page in ledger.exports.replies(wish.selection, corrected=False):
                yield from (_experience(reply, wish) for reply in page)
        case never:
            assert_never(never)


def _replies(ledger: Ledger, wish: Wish) -> Iterator[Reply]:
    for page in ledger.exports.replies(wish.selection):
        yield from page


def _experience(reply: Reply, wish: Wish) -> Row | str:
    if wish.min_reward is not None and (reply.reward is None or reply.reward < wish.min_reward):
        return "too low a reward"
    return export_formats.experience(reply)


def _said_to_be_better(ledger: Ledger, wish: Wish) -> Iterator[Row | str]:
    """Pairs by an edited answer, or by a preference."""
    for page in ledger.exports.replies(wish.selection):
        others = _others(ledger, wish, page)
        for reply in page:
            if export_formats.edit_of(reply) is not None:
                yield export_formats.dpo_of_edit(reply)
            for name in dict.fromkeys(_name(event) for event in export_formats.preferences(reply)):
                if (other := others.get(name)) is None:
                    yield "the other reply is not there"
                elif _is_better(reply, other):
                    event = export_formats.preference_between(reply, other)
                    yield export_formats.dpo_of_two(reply, other, source="preference", events=[event])


def _others(ledger: Ledger, wish: Wish, page: Iterable[Reply]) -> dict[tuple[str, int | None], Reply]:
    """The replies that came off worse than those of the page, by msg_id and choice; without a choice, the first."""
    msg_ids = {event.other_msg_id for reply in page for event in reply.said if event.kind == Kind.PREFERENCE}
    found: dict[tuple[str, int | None], Reply] = {}
    for reply in ledger.exports.replies_named(wish.selection.tenant, msg_ids):
        found[reply.msg_id, reply.choice] = reply
        found.setdefault((reply.msg_id, None), reply)
    return found


def _name(event: object) -> tuple[str, int | None]:
    return event.other_msg_id, event.other_choice  # type: ignore[attr-defined]


def _is_better(reply: Reply, other: Reply) -> bool:
    last = export_formats.preference_between(reply, other)
    return last is not None and last.msg_id == reply.msg_id and last.choice in (None, reply.choice)


def _better_rewarded(ledger: Ledger, wish: Wish) -> Iterator[Row | str]:
    """Pairs of replies to one prompt: the best against the worst. 24 bytes a reply are kept in memory meanwhile."""
    ranked = list(ledger.exports.ranked(wish.selection, export_formats.digest))
    for pairs in _in_pages(export_formats.best_and_worst(ranked, margin=wish.margin)):
        replies = ledger.exports.replies_by_id({each for pair in pairs for each in pair})
        for best, worst in pairs:
            if best in replies and worst in replies:
                yield _rewarded_pair(replies[best], replies[worst], wish)


def _rewarded_pair(best: Reply, worst: Reply, wish: Wish) -> Row | str:
    if wish.min_reward is not None and (best.reward or 0.0) < wish.min_reward:
        return "too low a reward"
    if export_formats.preference_between(best, worst) is not None:
        return "paired by a preference already"
    return export_formats.dpo_of_two(best, worst, source="reward", events=[*best.said, *worst.said])


def _in_pages(pairs: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    page: list[tuple[int, int]] = []
    for pair in pairs:
        page.append(pair)
        if len(page) == PAGE:
            yield page
            page = []
    if page:
        yield page
