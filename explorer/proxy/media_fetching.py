"""Fetches the files that requests name by URL, from the operator's hosts only, so that no engine fetches any.

A name is looked up once, and the connection goes to an address that was found then: what the name stands for a moment
later changes nothing. With TLS the certificate must be the name's all the same.
"""

import asyncio
import base64
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import Any

import httpx

from tuneloop.explorer.proxy.media import addresses_of, is_address, is_public, remote_files, with_files
from tuneloop.shared.errors import RequestRefused

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
