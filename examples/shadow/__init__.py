"""Production answers its users with one model, and trains another by running some of its calls again."""
