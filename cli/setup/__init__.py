"""Settings files: written, checked, reckoned."""
