"""Builds what all HTTP clients of the runner share: the key's header, checked URLs, and the TLS context."""

import ssl
from contextlib import suppress
from functools import cache

import httpx


def header_of_key(key: str | None, name: str = "api_key") -> dict[str, str]:
    """The authorization header, {} without a key. Raises ValueError, without the key, if a header cannot carry it."""
    if not key:
        return {}
    if not isinstance(key, str) or not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ValueError(f"{name} must be a text of visible ASCII characters")
    return {"authorization": f"Bearer {key}"}


def absolute_url(url: str, name: str, example: str) -> str:
    """The URL without its last slash. Raises ValueError for a relative one."""
    with suppress(httpx.InvalidURL):
        if httpx.URL(url).is_absolute_url and url.startswith(("http://", "https://")):
            return url.rstrip("/")
    raise ValueError(f"{name}: {url!r} must be an absolute URL, such as {example}")


@cache
def tls_context() -> ssl.SSLContext:
    """Uses the machine's certificates, or SSL_CERT_FILE and SSL_CERT_DIR."""
    return httpx.create_ssl_context()
