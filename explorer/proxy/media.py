"""Which images, sounds and films a request may name: an engine would fetch whatever URL a client writes.

A part of a message names a file by its URL, as a string or in an object with the field `url`; by its `uuid` it names
what the engine is to keep of the file, or has kept.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from tuneloop.shared.errors import RequestRefused

#: The fields of a request that hold messages, and those of a message or a part that hold parts.
_HOLDERS, _PARTS = ("messages", "input"), ("content", "output")

#: The fields of a part that name a file.
_MEDIA_FIELDS = ("image_url", "video_url", "audio_url", "file_url", "image", "video", "audio")

#: Anthropic's field, which may also tell where a text is from.
_SOURCE = "source"

_UUID = "uuid"

#: The fields of a message or a part that change.
_Change = Callable[[Mapping[str, Any]], dict[str, Any]]

_GIVEN_OUT = ipaddress.IPv6Network("2000::/3")

#: How long a name may take to be looked up, in seconds.
_LOOKUP_TIMEOUT_S = 5.0


async def addresses_of(host: str) -> Sequence[str]:
    """The addresses of a name, the best one first; none where it has none."""
    try:
        async with asyncio.timeout(_LOOKUP_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError):
        return ()
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def remote_files(body: Mapping[str, Any], domains: frozenset[str]) -> list[str]:
    """The URLs of the files that a request names, but for `data:` URLs, once each.

    Raises RequestRefused for one that is not from one of `domains`.
    """
    found: dict[str, None] = {}
    for param in _HOLDERS:
        for url in _urls(body.get(param)):
            if url.lstrip()[:5].lower() == "data:":
                continue
            if not _is_from(url, domains):
                raise RequestRefused(
                    "files are not fetched from URLs here: send them as `data:` URLs, or have the operator name the "
                    "host in explorer.allowed_media_domains",
                    code="media_url_not_allowed",
                    param=param,
                )
            found[url] = None
    return list(found)


def with_files(body: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """A copy of a request with other URLs: `files` has the new one for each that changes."""

    def replace(value: Any) -> Any:
        if isinstance(value, Mapping) and isinstance(url := value.get("url"), str):
            return {**value, "url": files.get(url, url)}
        return files.get(value, value) if isinstance(value, str) else value

    def change(part: Mapping[str, Any]) -> dict[str, Any]:
        return {name: replace(part[name]) for name in (*_MEDIA_FIELDS, _SOURCE) if name in part}

    return _change_body(body, change)


def with_own_uuids(body: dict[str, Any], tenant: str) -> dict[str, Any]:
    """A copy of a request with each `uuid` as its tenant's; the request itself, where it has none.

    An engine takes what it has kept under a uuid for the file, whoever sent it.
    """

    def change(part: Mapping[str, Any]) -> dict[str, Any]:
        return {} if part.get(_UUID) is None else {_UUID: f"{tenant}:{part[_UUID]}"}

    has_any = any(part.get(_UUID) is not None for param in _HOLDERS for part in _parts(body.get(param)))
    return _change_body(body, change) if has_any else body


def is_address(host: str) -> bool:
    """Whether a URL's host is an address instead of a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_public(address: str) -> bool:
    """Whether an address belongs to nobody's own network."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        # All that is given out is in 2000::/3; what leads from there to an IPv4 address leads to anybody's.
        return parsed in _GIVEN_OUT and parsed.is_global and not (parsed.sixtofour or parsed.teredo)
    return parsed.is_global and not parsed.is_multicast


def _urls(items: object) -> Iterator[str]:
    for item in _parts(items):
        for name in _MEDIA_FIELDS:
            value = item.get(name)
            url = value.get("url") if isinstance(value, Mapping) else value
            if isinstance(url, str):
                yield url
        if isinstance(source := item.get(_SOURCE), Mapping) and isinstance(url := source.get("url"), str):
            yield url


def _parts(items: object) -> Iterator[Mapping[str, Any]]:
    """Messages and their parts, of any depth."""
    for item in items if isinstance(items, list) else ():
        if isinstance(item, Mapping):
            yield item
            for name in _PARTS:
                yield from _parts(item.get(name))


def _change_body(body: Mapping[str, Any], change: _Change) -> dict[str, Any]:
    return {**body, **{param: _change_parts(body[param], change) for param in _HOLDERS if param in body}}


def _change_parts(items: Any, change: _Change) -> Any:
    if not isinstance(items, list):
        return items
    changed = []
    for each in items:
        if isinstance(each, Mapping):
            parts = {name: _change_parts(each[name], change) for name in _PARTS if name in each}
            changed.append({**each, **parts, **change(each)})
        else:
            changed.append(each)
    return changed


def _is_from(url: str, domains: frozenset[str]) -> bool:
    try:
        parts = urlsplit(url.strip())
        return parts.scheme in {"http", "https"} and parts.hostname in domains
    except ValueError:
        return False
