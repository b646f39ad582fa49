"""The page at /ui: what the training does, for people with a browser."""
