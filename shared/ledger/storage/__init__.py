"""The database itself: schema, connections, transactions, migrations."""
