"""Which images, sounds and films a request may name: an engine would fetch whatever URL a client writes."""

from collections.abc import Iterator, Mapping
from typing import Any

from tuneloop.shared.errors import RequestRefused

#: The fields of a request that hold messages, and those of a message or a part that hold parts.
_HOLDERS, _PARTS = ("messages", "input"), ("content", "output")

#: The fields of a part that name a file. Anthropic's `source` may also name the origin of a text.
_MEDIA_FIELDS = ("image_url", "video_url", "audio_url", "file_url", "image", "video", "audio")
_SOURCE, _UUID = "source", "uuid"


def refuse_remote_files(body: Mapping[str, Any]) -> None:
    """Raise RequestRefused for a file that is named by a URL other than `data:`."""
    for param in _HOLDERS:
        if any(url.lstrip()[:5].lower() != "data:" for url in _urls(body.get(param))):
            message = "files are not fetched from URLs: send them as `data:` URLs"
            raise RequestRefused(message, code="media_url_not_allowed", param=param)


def with_own_uuids(body: dict[str, Any], tenant: str) -> dict[str, Any]:
    """A copy with each `uuid` as its tenant's: an engine uses what it has under a uuid, from any sender."""
    if all(part.get(_UUID) is None for param in _HOLDERS for part in _parts(body.get(param))):
        return body

    def change(items: Any) -> Any:
        return [change_part(each) if isinstance(each, Mapping) else each for each in items]

    def change_part(part: Mapping[str, Any]) -> dict[str, Any]:
        parts = {name: change(part[name]) for name in _PARTS if isinstance(part.get(name), list)}
        uuid = {} if part.get(_UUID) is None else {_UUID: f"{tenant}:{part[_UUID]}"}
        return {**part, **parts, **uuid}

    return {**body, **{param: change(body[param]) for param in _HOLDERS if isinstance(body.get(param), list)}}


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
