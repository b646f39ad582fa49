"""Runs of the workflow: one attempt, its failures, and the rewards on their way to the services."""
