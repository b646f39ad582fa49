"""This file refuses settings with which strangers could come in."""

from contextlib import closing

from tuneloop.shared.errors import DatabaseAway, LedgerUnavailable, SettingsError
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.settings.settings import Settings


def check_exposure(settings: Settings) -> None:
    """Raise SettingsError where strangers could come in; a database that is away may have keys."""
    if settings.mode == "train" or settings.explorer.why_exposed(has_keys=False) is None:
        return
    schema = settings.buffer.trainer_input.experience_buffer.name
    try:
        there = revisions.current(settings.database_url, schema=schema) == revisions.newest()
        has_keys = there and _has_keys(settings)
    except (DatabaseAway, LedgerUnavailable):
        return
    if (problem := settings.explorer.why_exposed(has_keys=has_keys)) is not None:
        raise SettingsError(problem)


def _has_keys(settings: Settings) -> bool:
    with closing(Ledger.of(settings)) as ledger:
        return bool(ledger.keys.table().keys)
