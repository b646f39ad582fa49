"""Which images, sounds and films a request may name: an engine would fetch whatever URL a client writes.

A part of a message names a file by its URL, as a string or in an object with the field `url`; by its `uuid` it names
what the engine is to keep of the file, or has kept.

Files are fetched from the operator's hosts only, so that no engine fetches any. A name is looked up once, and the
connection goes to an address that was found then: what the name stands for a moment later changes nothing. With TLS the
certificate must be the name's all the same.
"""

import asyncio
import base64
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import httpx

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


#: Files of one request, and how long fetching all of them may take, in seconds.
MAX_FILES, FETCH_TIMEOUT_S = 16, 30.0

_CONNECT_TIMEOUT_S = 5.0

_MEDIA_TYPE = re.compile(r"[\w.+-]{1,64}/[\w.+-]{1,64}", re.ASCII)

#: Takes room for so many bytes. Raises RequestRefused where there is none.
Hold = Callable[[int], None]


class MediaFetcher:
    """Replaces the URLs in requests by what is there, as `data:` URLs.

    `max_bytes` are those of all files of a request. `look_up` finds the addresses of a name; `may_connect` says which
    of them are not inside somebody's network.
    """

    def __init__(
        self,
        domains: frozenset[str],
        *,
        max_bytes: int,
        look_up: Callable[[str], Awaitable[Sequence[str]]] = addresses_of,
        may_connect: Callable[[str], bool] = is_public,
        timeout_s: float = FETCH_TIMEOUT_S,
    ) -> None:
        self._domains = domains
        self._max_bytes = max_bytes
        self._look_up = look_up
        self._may_connect = may_connect
        self._timeout_s = timeout_s

    async def inline(self, upstream: dict[str, Any], hold: Hold) -> dict[str, Any]:
        """The request with its files in it: itself, where it names none. Raises RequestRefused."""
        urls = remote_files(upstream, self._domains)
        if not urls:
            return upstream
        if len(urls) > MAX_FILES:
            raise RequestRefused(
                f"a request may name {MAX_FILES} files by URL: send more of them as `data:` URLs", code="too_many"
            )
        budget = _ByteBudget(self._max_bytes, hold)
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as group:
                tasks = {url: group.create_task(self._fetch(url, budget)) for url in urls}
        except TimeoutError:
            raise _fetch_error(f"the files did not come within {self._timeout_s:g} seconds") from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return with_files(upstream, {url: task.result() for url, task in tasks.items()})

    async def _fetch(self, url: str, budget: "_ByteBudget") -> str:
        """The file as a `data:` URL."""
        try:
            parsed = httpx.URL(url.strip())
        except httpx.InvalidURL:
            raise _fetch_error("a URL cannot be read") from None
        host = parsed.host
        for address in await self._addresses(host):
            try:
                # Of its own for each: a kept connection was opened for another name, and cookies are for nobody else.
                async with (
                    httpx.AsyncClient(
                        transport=httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False),
                        timeout=httpx.Timeout(self._timeout_s, connect=_CONNECT_TIMEOUT_S),
                        follow_redirects=False,
                        trust_env=False,
                    ) as client,
                    client.stream(
                        "GET",
                        parsed.copy_with(host=address),
                        headers={"Host": parsed.netloc.decode("ascii"), "Accept-Encoding": "identity"},
                        extensions={"sni_hostname": parsed.raw_host.decode("ascii")},
                    ) as response,
                ):
                    if response.is_redirect:
                        raise _fetch_error(f"{parsed.host} answered {response.status_code}: redirects are not followed")
                    if response.status_code != 200:
                        raise _fetch_error(f"{parsed.host} answered {response.status_code}")
                    if response.headers.get("content-encoding", "identity") != "identity":
                        raise _fetch_error(f"{parsed.host} compresses what it was asked for as it is")
                    data = bytearray()
                    async for block in response.aiter_raw():
                        budget.take(len(block))
                        data += block
                found = _MEDIA_TYPE.match(response.headers.get("content-type", ""))
                media_type = found.group() if found else "application/octet-stream"
                return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue  # its next address
            except httpx.HTTPError as error:
                raise _fetch_error(f"{host} broke off: {type(error).__name__}") from None
        raise _fetch_error(f"{host} cannot be reached, or its certificate is not trusted")

    async def _addresses(self, host: str) -> Sequence[str]:
        if is_address(host):
            return [host]  # the operator has named it
        if host not in self._domains:  # another reader of URLs sees another host in it
            raise _fetch_error("a URL cannot be read")
        found = await self._look_up(host)
        if not found or not all(map(self._may_connect, found)):
            raise RequestRefused(
                f"{host} is, or may be, inside a private network: files are not fetched from there",
                code="media_url_not_allowed",
            )
        return found

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()


class _ByteBudget:
    """The bytes that the files of one request may still have."""

    def __init__(self, size: int, hold: Hold) -> None:
        self._size, self._left, self._hold = size, size, hold

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise RequestRefused(
                f"the files that the request names have more than {self._size} bytes", status=413, code="body_too_large"
            )
        self._hold(count)


def _fetch_error(reason: str) -> RequestRefused:
    return RequestRefused(reason, code="media_not_fetched")
