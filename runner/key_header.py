"""The header that says by an API key who asks. A key is quoted nowhere: not in a log, nor in an error."""


def header_of_key(key: str | None, name: str = "api_key") -> dict[str, str]:
    """The header, {} without a key. Raises ValueError for a key that no header can carry, which HTTP clients quote."""
    if not key:
        return {}
    if not isinstance(key, str) or not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ValueError(f"{name} must be a text of visible ASCII characters")
    return {"authorization": f"Bearer {key}"}
