"""The ledger: every exchange, feedback, batch and version in SQL."""
