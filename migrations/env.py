"""How Alembic runs: on the connection that `shared/ledger/storage/database.py` hands over, inside its transaction."""

from alembic import context

from tuneloop.migrations.older import bring_to_baseline

context.configure(connection=context.config.attributes["connection"])
bring_to_baseline(context.config.attributes["connection"])
context.run_migrations()
