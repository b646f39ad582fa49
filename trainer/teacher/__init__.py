"""The teacher of distillation: a local model or an endpoint."""
