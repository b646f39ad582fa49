"""The settings: what may be in them, where they come from, and what is wrong with them."""
