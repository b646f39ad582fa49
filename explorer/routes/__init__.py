"""The routes that do not sample: admin, passed-through, stored completions and responses."""
