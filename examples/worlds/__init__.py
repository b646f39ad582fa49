"""Common parts of the examples' worlds: tasks as files, and tiny models of their language."""
