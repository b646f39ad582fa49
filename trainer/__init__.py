"""The service that trains on committed experiences and publishes checkpoints."""
