"""The service that turns committed experiences into checkpoints."""
