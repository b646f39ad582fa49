"""Checkpoints: what a learner is restored from, how a version is published."""
