"""A model of 32 M parameters learns to answer as JSON, on a CPU."""
