"""Makes a workflow's model: an AgentScope chat model if AgentScope is installed, otherwise an `openai` client.

Each model belongs to a run, records its calls in `run.calls`, and applies default sampling parameters, which a call may
override.
"""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from tuneloop.runner.errors import ExtraMissing
from tuneloop.runner.models.run import Run, RunCalls
from tuneloop.runner.models.transport import client_arguments

#: `auto`: AgentScope's if installed, otherwise an `openai` client, synchronous for a plain function.
ClientKind = Literal["auto", "agentscope", "async_openai", "openai"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEndpoint:
    """An OpenAI-compatible service without a run; `base_url` includes `/v1`."""

    base_url: str
    api_key: str = "none"
    calls: RunCalls = field(default_factory=RunCalls, compare=False, repr=False)


CallsEndpoint = Run | ModelEndpoint  # the owner of a model's calls


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDefaults:
    """The `model` of requests, and defaults of their parameters; None sends none."""

    model_name: str
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    enable_thinking: bool | None = None
    timeout_s: float = 600.0

    def sampling(self) -> dict[str, Any]:
        """Request fields without the thinking."""
        fields = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        return {name: value for name, value in fields.items() if value is not None}

    def extra_body(self) -> dict[str, Any]:
        """Request fields that OpenAI's API lacks."""
        return (
            {} if self.enable_thinking is None else {"chat_template_kwargs": {"enable_thinking": self.enable_thinking}}
        )


def make_model(bound: CallsEndpoint, defaults: CallDefaults, *, client: ClientKind = "auto", sync: bool = False) -> Any:
    """A model whose calls belong to `bound`. Raises ExtraMissing without the package."""
    if client == "auto":
        client = "agentscope" if importlib.util.find_spec("agentscope") else "openai" if sync else "async_openai"
    if client == "agentscope":
        try:
            from agentscope import model as models
        except ImportError as error:
            if importlib.util.find_spec("agentscope"):  # 1.x does not declare all dependencies
                why = f"AgentScope is installed, and cannot be imported ({error})"
                raise ExtraMissing("agentscope1", why) from error
            raise ExtraMissing("agentscope", "the workflow needs an AgentScope chat model") from error
        arguments = {"base_url": bound.base_url, **client_arguments(bound.calls, defaults.timeout_s, sync=False)}
        if importlib.util.find_spec("agentscope.credential"):
            from agentscope.credential import OpenAICredential

            arguments.pop("base_url")
            found = models.OpenAIChatModel(
                credential=OpenAICredential(api_key=bound.api_key, base_url=bound.base_url),
                model=defaults.model_name,
                parameters=models.OpenAIChatModel.Parameters(**defaults.sampling()),
                stream=False,
                client_kwargs=arguments,
                extra_body=defaults.extra_body() or None,
            )
            found.model_name = defaults.model_name  # as in 1.x and in openai's clients
            return found
        generate: dict[str, Any] = defaults.sampling()
        if extra := defaults.extra_body():
            generate["extra_body"] = extra
        return models.OpenAIChatModel(
            defaults.model_name, api_key=bound.api_key, stream=False, client_kwargs=arguments, generate_kwargs=generate
        )
    is_sync = client == "openai"
    arguments = client_arguments(bound.calls, defaults.timeout_s, sync=is_sync)
    made = _openai_classes(defaults)[0 if is_sync else 1]
    return made(api_key=bound.api_key, base_url=bound.base_url, **arguments)


def wanted_client(workflow: Callable[..., Any]) -> tuple[ClientKind, bool]:
    """The client that a workflow needs, by the annotation of `model`, and whether it is a plain function."""
    inner: Any = workflow
    while hasattr(inner, "func"):  # functools.partial
        inner = inner.func
    sync = not any(map(inspect.iscoroutinefunction, (inner, getattr(inner, "__call__", None))))  # noqa: B004
    try:
        annotation = inspect.signature(workflow).parameters["model"].annotation
    except (KeyError, TypeError, ValueError):
        return "auto", sync
    name = str(annotation if isinstance(annotation, str) else getattr(annotation, "__name__", ""))
    kinds: dict[str, ClientKind] = {"OpenAI": "openai", "AsyncOpenAI": "async_openai"}
    return kinds.get(name.rpartition(".")[2], "auto"), sync


def _with_defaults(options: Any, defaults: CallDefaults) -> Any:
    body = options.json_data
    if isinstance(body, dict) and str(options.url).endswith(("/chat/completions", "/completions")):
        merged = {**defaults.sampling(), **body}
        if body.get("max_completion_tokens") is not None and "max_tokens" not in body:
            merged.pop("max_tokens", None)
        options.json_data = merged
        options.extra_json = {**defaults.extra_body(), **(options.extra_json or {})} or None
    return options


@lru_cache(maxsize=64)
def _openai_classes(defaults: CallDefaults) -> tuple[Any, Any]:
    """Client classes with these defaults: subclasses, so that copies (`with_options`) keep them."""
    try:
        import openai
    except ImportError as error:
        raise ExtraMissing("openai", "a workflow's model is an openai client unless AgentScope is installed") from error

    class BoundOpenAI(openai.OpenAI):
        model_name = defaults.model_name

        def _prepare_options(self, options: Any) -> Any:
            return _with_defaults(super()._prepare_options(options), defaults)

    class BoundAsyncOpenAI(openai.AsyncOpenAI):
        model_name = defaults.model_name

        async def _prepare_options(self, options: Any) -> Any:
            return _with_defaults(await super()._prepare_options(options), defaults)

    return BoundOpenAI, BoundAsyncOpenAI
