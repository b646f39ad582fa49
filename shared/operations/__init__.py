"""What an operator asks: reports, diagnosis, retention."""
