"""A verifier of checkpoints that is forked from a process which has imported all that it needs.

An explorer verifies when it starts, and whenever there is a version. To start Python and numpy for it takes a quarter
of a second, which hundreds of tests would pay. A base model of the same files as one that was read before is not read
again: nearly all tests have the same one.
"""

import asyncio
import hashlib
import io
import multiprocessing
import sys
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path

from tuneloop.explorer.versions import verifier
from tuneloop.shared.process_time import cpu_seconds

_WARM = multiprocessing.get_context("forkserver")
_WARM.set_forkserver_preload([verifier.__name__])

#: What was printed of base models that could be read, by the digest of their files.
_READ: dict[str, bytes] = {}


class WarmVerifier:
    """What the explorer knows of a verifier's process."""

    def __init__(self, *arguments: str) -> None:
        self._base = digest_of(Path(arguments[0])) if arguments[2] == "0" else None
        self._told, told = _WARM.Pipe(duplex=False)
        self._process = _WARM.Process(target=_verify, args=(arguments, told), daemon=True)
        self._process.start()
        told.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def communicate(self) -> tuple[bytes, None]:
        """Its output, once it has ended."""
        try:
            said = await asyncio.to_thread(self._output)
        finally:
            self._told.close()
        return said, None

    def _output(self) -> bytes:
        try:
            said = self._told.recv_bytes()
        except EOFError:
            said = b""
        self._process.join()
        if self._base and self._process.exitcode == 0:
            _READ[self._base] = said
        return said

    def kill(self) -> None:
        self._process.kill()

    def cpu_s(self) -> float:
        return cpu_seconds(self._process.pid or 0)

    async def wait(self) -> None:
        await asyncio.to_thread(self._process.join)


class PastVerifier:
    """One that has ended well before, and had this to say."""

    returncode = 0

    def __init__(self, said: bytes) -> None:
        self._said = said

    async def communicate(self) -> tuple[bytes, None]:
        return self._said, None

    def cpu_s(self) -> float:
        return 0.0


def digest_of(folder: Path) -> str | None:
    """Of a model's files, with their names; None if there is no such folder."""
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for each in sorted(folder.iterdir()):
        digest.update(each.name.encode() + (each.read_bytes() if each.is_file() else b""))
    return digest.hexdigest()


async def start_warm_verifier(*arguments: str) -> WarmVerifier | PastVerifier:
    """In place of `loading.start_verifier`."""
    folder, _, version, *_ = arguments
    if version == "0" and (said := _READ.get(digest_of(Path(folder)) or "")) is not None:
        return PastVerifier(said)
    return await asyncio.to_thread(WarmVerifier, *arguments)


def _verify(arguments: tuple[str, ...], told: Connection) -> None:
    sys.argv = [verifier.__name__, *arguments]
    with redirect_stdout(io.StringIO()) as said:
        code = verifier.main()
    told.send_bytes(said.getvalue().encode())
    sys.exit(code)
