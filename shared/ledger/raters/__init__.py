"""Who rates, and how far each can be relied on."""
