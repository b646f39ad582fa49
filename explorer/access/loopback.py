"""Who may come in where there are no keys: programs of this machine, and no website that a browser here has open.

A name of a website that suddenly means 127.0.0.1 (DNS rebinding) stands in `Host`, and a request that a website's page
sends across sites has its `Origin`. What a proxy forwards may come from anywhere.
"""

import ipaddress
import re
from collections.abc import Collection, Iterable
from functools import lru_cache

from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.settings.serving import is_loopback

_HEARD = 512

_ORIGIN = re.compile(rb"[a-z][a-z0-9+.-]*://([^/@?#]+)", re.IGNORECASE).fullmatch
_BRACKETED = re.compile(r"\[([^\]]*)\](?::\d*)?").fullmatch

_OF_PROXIES = re.compile(rb"forwarded|via|x-real-ip|x-forwarded-.*").fullmatch

#: What changes nothing: a browser may send it, and shows its page nothing of the answer.
_HARMLESS = frozenset({"GET", "HEAD"})


class HostRules:
    """The names under which this machine may be asked."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(each.lower() for each in allowed)
        self._is_ours = lru_cache(_HEARD)(self._is_ours_uncached)

    def check(self, method: str, host: bytes | None, origin: bytes | None) -> None:
        """Raise RequestRefused for a request that a browser was led to send. No browser leaves out `Host`."""
        if host is not None and not self._is_ours(host):
            raise RequestRefused(
                "without keys, this host name is not answered for: name this machine localhost, list the name in "
                "explorer.allowed_hosts, or make a key (tuneloop keys create)",
                status=403,
                code="host_not_allowed",
            )
        if origin is not None and method not in _HARMLESS and not self._is_ours(_host_of(origin)):
            raise RequestRefused(
                "without keys, pages of other sites may send nothing here",
                status=403,
                code="origin_not_allowed",
            )

    def _is_ours_uncached(self, host: bytes) -> bool:
        name = _name_of(host.decode("latin-1").lower())
        return name in self._allowed or is_loopback(name)


def is_proxied(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a proxy has forwarded the request: only a proxy sends such headers.

    >>> is_proxied([(b"via", b"1.1 x")]), is_proxied([(b"host", b"localhost")])
    (True, False)
    """
    return any(_OF_PROXIES(name) for name, _ in headers)


def is_from_here(client: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request was sent on this machine, and not for somebody elsewhere."""
    try:
        found = ipaddress.ip_address(client)
    except ValueError:
        return False
    here = (getattr(found, "ipv4_mapped", None) or found).is_loopback
    return here and not is_proxied(headers)


def _host_of(origin: bytes) -> bytes:
    found = _ORIGIN(origin)
    return found[1] if found else b""


def _name_of(host: str) -> str:
    """A host without its port.

    >>> _name_of("localhost:8010"), _name_of("[::1]:8010"), _name_of("::1")
    ('localhost', '::1', '::1')
    """
    if (found := _BRACKETED(host)) is not None:
        return found[1]
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError:
        return host.partition(":")[0].removesuffix(".")
