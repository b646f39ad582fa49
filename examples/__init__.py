"""Small programs that run."""
