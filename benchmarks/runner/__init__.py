"""What runs of agents cost beyond their calls, and whether they keep an engine busy."""
