"""The engines: which of them answers, the client to them, their processes and weights."""
