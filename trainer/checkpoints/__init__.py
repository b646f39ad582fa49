"""Checkpoints: saving and restoring a learner, publishing a version."""
