"""Chat templates of clients: they are programs, which no engine may run."""

from collections.abc import Mapping
from typing import Any

from tuneloop.shared.errors import RequestRefused


def check_template(body: Mapping[str, Any]) -> None:
    """Raise RequestRefused for a request that brings a chat template of its own.

    vLLM refuses it too, unless it is told to trust requests, as engines that others started may be.
    """
    inner = body.get("chat_template_kwargs")
    for holder, param in ((body, "chat_template"), (inner, "chat_template_kwargs.chat_template")):
        if isinstance(holder, Mapping) and holder.get("chat_template") is not None:
            raise RequestRefused(
                "a chat template is a program: the model's own is used", code="chat_template_not_allowed", param=param
            )
