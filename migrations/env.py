"""How Alembic runs: on the connection that `shared/ledger/storage/database.py` hands over, inside its transaction."""

from alembic import context

import tuneloop.shared.ledger.raters.rater_tables
import tuneloop.shared.ledger.storage.schema  # noqa: F401 - its tables are in the metadata
from tuneloop.shared.ledger.storage.schema_types import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
