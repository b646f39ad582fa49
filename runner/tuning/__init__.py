"""tune(): workflows run, rewarded, committed and evaluated against a service."""
