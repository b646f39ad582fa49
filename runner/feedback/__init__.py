"""Feedback on replies, from an app to the service, through an outbox on disk."""
