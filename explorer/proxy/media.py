"""Which images, sounds and films a request may name: an engine would fetch whatever URL a client writes."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from tuneloop.shared.errors import RequestRefused

#: The fields of a part that name a file, as a URL or as an object with one.
_MEDIA_FIELDS = ("image_url", "video_url", "audio_url", "file_url", "image", "video", "audio")


def check_media(upstream: Mapping[str, Any], domains: frozenset[str]) -> None:
    """Raise RequestRefused for a file that is neither in the request itself, as `data:`, nor from one of `domains`.

    `upstream` is the request as an engine gets it.
    """
    for name in ("messages", "input"):
        for url in _urls(upstream.get(name)):
            if not _is_allowed(url, domains):
                raise RequestRefused(
                    "files are not fetched from URLs here: send them as `data:` URLs, or have the operator name the "
                    "host in explorer.allowed_media_domains",
                    code="media_url_not_allowed",
                    param=name,
                )


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
