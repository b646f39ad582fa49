"""Tenants whose tasks contradict each other, each with a policy of its own."""
