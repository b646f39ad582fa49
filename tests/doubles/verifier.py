"""A verifier of checkpoints that is forked from a process which has imported all that it needs.

An explorer verifies when it starts, and whenever there is a version. To start Python and numpy for it takes a quarter
of a second, which hundreds of tests would pay.
"""

import asyncio
import io
import sys
from contextlib import redirect_stdout
from multiprocessing.connection import Connection

from tests.doubles.warm import WARM
from tuneloop.explorer.versions import verifier


class WarmVerifier:
    """What the explorer knows of a verifier's process."""

    def __init__(self, *arguments: str) -> None:
        self._told, told = WARM.Pipe(duplex=False)
        self._process = WARM.Process(target=_verify, args=(arguments, told), daemon=True)
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
        return said

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> None:
        await asyncio.to_thread(self._process.join)


async def start_warm_verifier(*arguments: str) -> WarmVerifier:
    """In place of `loading.start_verifier`."""
    return await asyncio.to_thread(WarmVerifier, *arguments)


def _verify(arguments: tuple[str, ...], told: Connection) -> None:
    sys.argv = [verifier.__name__, *arguments]
    with redirect_stdout(io.StringIO()) as said:
        code = verifier.main()
    told.send_bytes(said.getvalue().encode())
    sys.exit(code)
