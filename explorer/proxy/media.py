"""Which images, sounds and films a request may name: an engine would fetch whatever URL a client writes."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from tuneloop.shared.errors import RequestRefused

#: The fields of a part that name a file, as a URL or as an object with one.
_MEDIA_FIELDS = ("image_url", "video_url", "audio_url", "file_url", "image", "video", "audio")

#: How long a name may take to be looked up, in seconds.
_LOOKUP_TIMEOUT_S = 5.0


async def addresses_of(host: str) -> Collection[str]:
    """The addresses of a name; one that is no public one where it has none."""
    try:
        async with asyncio.timeout(_LOOKUP_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError):
        return ["0.0.0.0"]
    return {str(address[0]).partition("%")[0] for *_, address in found} or ["0.0.0.0"]


async def check_media(
    upstream: Mapping[str, Any],
    domains: frozenset[str],
    *,
    look_up: Callable[[str], Awaitable[Collection[str]]] = addresses_of,
) -> None:
    """Raise RequestRefused for a file that is neither in the request itself, as `data:`, nor from one of `domains`.

    Nor may the name of one of them stand for an address inside somebody's network, unless `domains` has that address
    itself. `upstream` is the request as an engine gets it.
    """
    hosts = set()
    for name in ("messages", "input"):
        for url in _urls(upstream.get(name)):
            if not _is_allowed(url, domains):
                raise RequestRefused(
                    "files are not fetched from URLs here: send them as `data:` URLs, or have the operator name the "
                    "host in explorer.allowed_media_domains",
                    code="media_url_not_allowed",
                    param=name,
                )
            hosts.add(urlsplit(url.strip()).hostname)
    for host in sorted(each for each in hosts if each is not None and not _is_address(each)):
        if not all(map(_is_public, await look_up(host))):
            raise RequestRefused(
                f"{host} is, or may be, inside a private network: files are not fetched from there",
                code="media_url_not_allowed",
            )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    inner = getattr(parsed, "ipv4_mapped", None) or getattr(parsed, "sixtofour", None)
    return parsed.is_global and not parsed.is_multicast and (inner is None or inner.is_global)


def _urls(items: object) -> Iterator[str]:
    for item in _objects(items):
        for part in (*_objects(item.get("content")), *_objects(item.get("output"))):
            for name in _MEDIA_FIELDS:
                value = part.get(name)
                url = value.get("url") if isinstance(value, Mapping) else value
                if isinstance(url, str):
                    yield url


def _objects(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _is_allowed(url: str, domains: frozenset[str]) -> bool:
    try:
        parts = urlsplit(url.strip())
        return parts.scheme == "data" or (parts.scheme in {"http", "https"} and parts.hostname in domains)
    except ValueError:
        return False
