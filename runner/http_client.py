"""What every client of ours has: the header of its key, and the certificates."""

import ssl
from contextlib import suppress
from functools import cache

import httpx


def header_of_key(key: str | None, name: str = "api_key") -> dict[str, str]:
    """The header, {} without a key. Raises ValueError for a key that no header can carry, which HTTP clients quote."""
    if not key:
        return {}
    if not isinstance(key, str) or not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ValueError(f"{name} must be a text of visible ASCII characters")
    return {"authorization": f"Bearer {key}"}


def absolute_url(url: str, name: str, example: str) -> str:
    """The URL without its last slash. Raises ValueError unless it is absolute."""
    with suppress(httpx.InvalidURL):
        if httpx.URL(url).is_absolute_url and url.startswith(("http://", "https://")):
            return url.rstrip("/")
    raise ValueError(f"{name}: {url!r} must be an absolute URL, such as {example}")


@cache
def tls_context() -> ssl.SSLContext:
    """By the certificates of the machine, or those that SSL_CERT_FILE or SSL_CERT_DIR names."""
    return httpx.create_ssl_context()
