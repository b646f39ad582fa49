"""The cost of agents' runs beyond their calls, and the load that they put on an engine."""
