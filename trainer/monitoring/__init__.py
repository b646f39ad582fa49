"""Monitors of steps and replies, and their alarms."""
