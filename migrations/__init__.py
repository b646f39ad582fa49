"""The database schema, step by step, for Alembic."""
