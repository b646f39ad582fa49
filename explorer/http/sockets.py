"""The listening socket. All workers accept from its queue: no connection waits for one that is busy or gone."""

import socket
from contextlib import ExitStack

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.settings import Settings

_BACKLOG = 2048


def listen(settings: Settings, stack: ExitStack) -> socket.socket:
    """The socket, closed by `stack`. Raises EnvironmentRefused if the port is taken."""
    explorer = settings.explorer
    family = socket.AF_INET6 if ":" in explorer.listen_address else socket.AF_INET
    found = stack.enter_context(socket.socket(family))
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((explorer.listen_address, explorer.proxy_port))
        found.listen(_BACKLOG)  # else another that starts at this moment could bind it too
    except OSError as error:
        raise EnvironmentRefused(
            f"explorer.proxy_port: cannot listen on {explorer.listen_address}:{explorer.proxy_port}: {error.strerror}; "
            "choose another port, or stop the process that has it"
        ) from None
    return found
