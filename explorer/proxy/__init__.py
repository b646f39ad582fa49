"""The hot path: a request to an engine, its reply to the client and to the outbox."""
