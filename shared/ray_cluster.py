"""Whom a Ray cluster answers: this machine alone, or those who show its token. Who reaches Ray can run anything."""

import os
import secrets

from tuneloop.shared.errors import EnvironmentRefused

#: The address that stands for a cluster of one's own, of this machine, which ends with who started it.
LOCAL = "local"

#: A question that every cluster answers, of those that show its token.
_QUESTION = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_ANSWER_S = 10.0


def keep_to_this_machine() -> None:
    """Let this process's cluster listen on loopback alone, with a token. To be called before Ray is imported."""
    os.environ |= {
        # As on the systems where it runs on one machine only. No other setting does it: it replaces a loopback address
        # that it is given by the machine's own.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def require_token(address: str, *, insecure: bool) -> None:
    """Raise EnvironmentRefused if the cluster whose head is at `address` answers who shows no token."""
    if insecure:
        return
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_QUESTION)(b"", timeout=_ANSWER_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return
            raise EnvironmentRefused(f"cluster.ray_address: {address}: {error.details()}") from None
    raise EnvironmentRefused(
        f"cluster.ray_address: the Ray cluster at {address} runs what any program sends that reaches it: start Ray on "
        "each of its machines, and this service, with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN (`ray "
        "get-auth-token --generate` makes one), or set explorer.insecure in a laboratory that no stranger reaches"
    )
