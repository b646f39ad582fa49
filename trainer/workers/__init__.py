"""The trainer as several processes, one for each GPU."""
