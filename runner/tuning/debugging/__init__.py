"""A workflow run once, before anything is trained: by a command, or by a file's own switch."""
