"""How Alembic runs: on the connection that `shared.database.upgrade` hands over, inside its transaction."""

from alembic import context

from shared.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
