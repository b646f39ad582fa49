"""The listening sockets, one for each worker on one port. They outlive the workers."""

import socket
from contextlib import ExitStack

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.hardware import explorer_workers_of
from tuneloop.shared.settings.settings import Settings

_BACKLOG = 2048


def listen(settings: Settings, stack: ExitStack) -> list[socket.socket]:
    """The sockets, closed by `stack`. Raises EnvironmentRefused if the port is taken."""
    explorer, workers = settings.explorer, explorer_workers_of(settings)
    family = socket.AF_INET6 if ":" in explorer.listen_address else socket.AF_INET
    first = stack.enter_context(socket.socket(family))
    try:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind((explorer.listen_address, explorer.proxy_port))
        if workers == 1:
            first.listen(_BACKLOG)  # else another that starts at this moment could bind it too
            return [first]
        # Sockets on the port of `keeper`, which itself does not listen: it keeps other processes off the port.
        # Sockets that share a port must all allow it; a second service that did would silently get a part of the
        # requests.
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sockets = [stack.enter_context(socket.socket(first.family)) for _ in range(workers)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind(first.getsockname())
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
        for each in sockets:
            each.listen(_BACKLOG)
        return sockets
    except OSError as error:
        raise EnvironmentRefused(
            f"explorer.proxy_port: cannot listen on {explorer.listen_address}:{explorer.proxy_port}: {error.strerror}; "
            "choose another port, or stop the process that has it"
        ) from None
