"""What the worlds of the examples share: their tasks as files, and tiny models that know their language."""
