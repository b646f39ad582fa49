"""What is replaced before anything is written: personal data and secrets."""
