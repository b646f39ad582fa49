"""The blocks of code of the documentation run: against a real explorer, and with the real command line."""
