"""The trainer as several processes, one per GPU."""
