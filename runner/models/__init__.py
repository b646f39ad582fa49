"""A run, and the model that a workflow gets: every call belongs to its run."""
