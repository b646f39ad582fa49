"""Files from the hosts that the operator names: fetched by the explorer, from the address that was looked at."""

import asyncio
import ssl
import subprocess
import threading
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.doubles.engine import MODEL, EnginePlace
from tests.explorer.running import explorer_running, settings_for
from tuneloop.explorer.proxy import media
from tuneloop.explorer.proxy.media import MediaFetcher
from tuneloop.shared.errors import RequestRefused

#: Two addresses of this machine: the first stands for one on the internet, the second for one inside.
OUTSIDE, INSIDE = "127.0.0.2", "127.0.0.3"
HOST = "cdn.shop.example"
PNG = b"\x89PNG, as it were"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: image/png; x=y\r\nContent-Length: %d\r\n\r\n%b" % (len(PNG), PNG)

#: Addresses that are inside, each in one of the ways in which one can be.
PRIVATE = (
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("::1", "fe80::1", "fd00::1", "::ffff:10.0.0.1", "2002:a00:1::", "::"),
)


class Names:
    """A resolver whose answers change: each is given once, the last one for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


class Site:
    """Web servers on both addresses, at one port; `heads` has what was asked of which."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.port = 0
        self.heads: list[tuple[str, bytes]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append((writer.get_extra_info("sockname")[0], head))
        writer.write(self.answer)
        await writer.drain()
        writer.close()

    def url(self, scheme: str = "http") -> str:
        """Where it is."""
        return f"{scheme}://{HOST}:{self.port}/a.png?b=c"


@asynccontextmanager
async def site(answer: bytes = OK, tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    served = Site(answer)
    first = await asyncio.start_server(served.serve, OUTSIDE, 0, ssl=tls)
    served.port = first.sockets[0].getsockname()[1]
    second = await asyncio.start_server(served.serve, INSIDE, served.port, ssl=tls)
    async with first, second:
        yield served


def fetcher(names: Names, **but: Any) -> MediaFetcher:
    arguments: dict[str, Any] = {"max_bytes": 1000, "look_up": names, "may_connect": lambda each: each != INSIDE}
    return MediaFetcher(frozenset({HOST}), **(arguments | but))


def chat(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    return {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, *parts]}]}


def held(sizes: list[int]) -> Any:
    return sizes.append


async def refusal(fetching: MediaFetcher, *urls: str) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        await fetching.inline(chat(*urls), lambda size: None)
    return caught.value


async def test_the_engine_gets_the_file_and_no_url() -> None:
    sizes: list[int] = []
    async with site() as served:
        url = served.url()
        given = chat(url, url)
        got = await fetcher(Names([OUTSIDE])).inline(given, held(sizes))
    text, first, second = got["messages"][0]["content"]
    assert text == {"type": "text", "text": "see"}
    kind, _, data = first["image_url"]["url"].partition(",")
    assert (kind, b64decode(data), first["image_url"]["detail"]) == ("data:image/png;base64", PNG, "low")
    assert second == first
    assert given == chat(url, url)  # what is recorded stays as it was
    assert sum(sizes) == len(PNG)
    [(where, head)] = served.heads  # once, though it is named twice
    assert where == OUTSIDE
    assert head.startswith(b"GET /a.png?b=c HTTP/1.1\r\n")
    assert f"Host: {HOST}:{served.port}\r\n".encode() in head


async def test_a_name_that_means_something_else_a_moment_later_changes_nothing() -> None:
    """Whoever has the name answers with an address outside when it is looked at, and with one inside afterwards."""
    names = Names([OUTSIDE], [INSIDE])
    async with site() as served:
        fetching = fetcher(names)
        await fetching.inline(chat(served.url()), lambda size: None)
        assert [where for where, _ in served.heads] == [OUTSIDE]
        assert names.asked == [HOST]
        refused = await refusal(fetching, served.url())
        assert refused.code == "media_url_not_allowed"
        assert [where for where, _ in served.heads] == [OUTSIDE]


@pytest.mark.parametrize("address", PRIVATE)
async def test_a_name_that_stands_for_an_address_inside_is_refused(address: str) -> None:
    names = Names(["93.184.216.34", address])
    refused = await refusal(MediaFetcher(frozenset({HOST}), max_bytes=1, look_up=names), f"http://{HOST}/")
    assert refused.code == "media_url_not_allowed"
    assert "private network" in str(refused)


async def test_a_name_that_nobody_knows_is_refused() -> None:
    fetching = MediaFetcher(frozenset({"no-such-host.invalid"}), max_bytes=1)
    assert "private network" in str(await refusal(fetching, "http://no-such-host.invalid/x.png"))


async def test_an_address_that_the_operator_names_is_what_he_wants() -> None:
    async with site() as served:
        fetching = MediaFetcher(frozenset({INSIDE}), max_bytes=1000)
        await fetching.inline(chat(f"http://{INSIDE}:{served.port}/"), lambda size: None)
        assert [where for where, _ in served.heads] == [INSIDE]


REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: http://%b/\r\nContent-Length: 0\r\n\r\n" % INSIDE.encode()
PACKED = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (REDIRECT, "redirects are not followed"),
        (PACKED, "compresses"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answered 404"),
        (OK[:-1], "broke off"),
        (b"SSH-2.0-x\r\n", "broke off"),
    ],
)
async def test_what_is_no_file_is_refused(answer: bytes, reason: str) -> None:
    async with site(answer) as served:
        refused = await refusal(fetcher(Names([OUTSIDE])), served.url())
        assert (refused.status, refused.code) == (400, "media_not_fetched")
        assert reason in str(refused)
        assert [where for where, _ in served.heads] == [OUTSIDE]


async def test_files_are_bounded_in_bytes_number_and_time() -> None:
    async with site() as served:
        names = Names([OUTSIDE])
        refused = await refusal(fetcher(names, max_bytes=2 * len(PNG) - 1), f"{served.url()}1", f"{served.url()}2")
        assert (refused.status, refused.code) == (413, "body_too_large")
        many = [f"{served.url()}{number}" for number in range(media.MAX_FILES + 1)]
        assert (await refusal(fetcher(names), *many)).code == "too_many"
    async with silent() as url:
        refused = await refusal(fetcher(names, timeout_s=0.1), url)
        assert (refused.code, str(refused)) == ("media_not_fetched", "the files did not come within 0.1 seconds")


async def test_there_is_no_room_where_the_worker_holds_enough() -> None:
    full = RequestRefused("full", status=503, code="overloaded")

    def refuse(size: int) -> None:
        raise full

    async with site() as served:
        with pytest.raises(RequestRefused) as caught:
            await fetcher(Names([OUTSIDE])).inline(chat(served.url()), refuse)
        assert caught.value is full


@asynccontextmanager
async def silent() -> AsyncIterator[str]:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(wait, OUTSIDE, 0) as server:
        yield f"http://{HOST}:{server.sockets[0].getsockname()[1]}/"


def tls_of(folder: Path, name: str) -> ssl.SSLContext:
    """A server's side, with a certificate for a name."""
    key, signed = folder / f"{name}.key", folder / f"{name}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-days", "2"]
    subprocess.run([*command, *names, "-keyout", str(key), "-out", str(signed)], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(signed, key)
    return context


async def test_the_certificate_must_be_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, is_taken in ((HOST, True), ("other.example", False)):
        context = tls_of(tmp_path, name)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / f"{name}.pem"))
        async with site(tls=context) as served:
            fetching = fetcher(Names([OUTSIDE]))
            if is_taken:
                await fetching.inline(chat(served.url("https")), lambda size: None)
                continue
            assert "certificate is not trusted" in str(await refusal(fetching, served.url("https")))
            assert served.heads == []


class _Files(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.end_headers()
        self.wfile.write(PNG)


@contextmanager
def file_server() -> Iterator[str]:
    with ThreadingHTTPServer((OUTSIDE, 0), _Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{OUTSIDE}:{server.server_port}/a.png"
        server.shutdown()


def test_through_the_explorer(tmp_path: Path, places: list[EnginePlace]) -> None:
    """The engine gets the file, also where the conversation that goes on has it, and the ledger keeps the URL."""
    engine = places[0].fresh()
    settings = settings_for(tmp_path, [engine.url], allowed_media_domains=[OUTSIDE])
    with explorer_running(settings) as explorer, file_server() as url:
        body = chat(url) | {"model": MODEL, "max_tokens": 4}
        answer = explorer.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        [part] = engine.chats[-1].body["messages"][0]["content"][1:]
        assert part["image_url"]["url"].startswith("data:image/png;base64,")
        [kept] = explorer.exchanges()
        assert orjson.loads(kept.request)["messages"] == body["messages"]
        image = {"type": "input_image", "image_url": url, "detail": "auto"}
        first = explorer.http.post(
            "/v1/responses", json={"model": MODEL, "input": [{"role": "user", "content": [image]}]}
        ).json()
        on = {"model": MODEL, "input": "and then?", "previous_response_id": first["id"]}
        assert explorer.http.post("/v1/responses", json=on).status_code == 200
        sent = orjson.dumps(engine.chats[-1].body).decode()
        assert "data:image/png;base64," in sent
        assert "and then?" in sent
        assert url not in sent
        assert explorer.app.limits.held_bytes == 0
