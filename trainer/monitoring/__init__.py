"""Monitors over steps and replies, which raise alarms."""
