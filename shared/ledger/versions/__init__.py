"""Versions in the ledger: states, decisions, events, comparisons, alarms."""
