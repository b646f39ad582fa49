"""How Alembic runs: on the connection that `shared.database.upgrade` hands over, inside its transaction."""

from alembic import context

import shared.schema  # noqa: F401 - its tables are in the metadata
from shared.schema_types import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
