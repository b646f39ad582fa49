"""Who may come in: keys, what each may do and how much of it, and the rules for callers without one."""
