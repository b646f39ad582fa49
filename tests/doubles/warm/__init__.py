"""Processes that are forked from one which has imported what they need."""
