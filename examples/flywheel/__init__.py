"""Train, let users ask, make tasks of their rejected answers, vary the tasks, train again."""
