"""What the machine can hold, and how fast it is."""
