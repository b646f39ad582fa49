"""All of the page: its parts put together."""

from functools import partial

from fastapi import APIRouter, FastAPI

from tuneloop.explorer.auth import EntryGate
from tuneloop.explorer.ui.front_door import add_front_door
from tuneloop.explorer.ui.ledger_counts import LedgerCounts
from tuneloop.explorer.ui.operations import add_changes, add_operations
from tuneloop.explorer.ui.pages import add_exchanges, add_overview
from tuneloop.explorer.ui.rating import add_rating
from tuneloop.explorer.ui.site import Site, add_site
from tuneloop.explorer.ui.version_pages import add_versions
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings


def add_routes(app: FastAPI, settings: Settings, ledger: Ledger, gate: EntryGate) -> None:
    """Add the page to the app."""
    site, counts = Site(settings, ledger, gate), LedgerCounts(settings, ledger)
    operations = partial(add_operations, counts=counts)
    overview = partial(add_overview, counts=counts)
    add_site(app, site, overview, add_exchanges, add_versions, add_rating, operations, add_changes)
    front_door = APIRouter(include_in_schema=False)
    add_front_door(front_door, site)
    app.router.routes += front_door.routes
