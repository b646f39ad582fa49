"""Train, let users ask, make tasks of what they were not content with, vary them, train again."""
