"""Tasks for a tiny model, each of them played by an agent: one-digit sums, a choice of tools, and a calculator."""
