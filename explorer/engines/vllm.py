"""vLLM 0.26 to 0.33: the command that starts it, and its weight routes, which need private sockets."""

import asyncio
import copy
import importlib.metadata
import json
import os
import random
import re
import ssl
import string
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import orjson
import structlog

from tuneloop.explorer.engines.adapter_names import ModelRenaming, adapter_name_of, is_adapter
from tuneloop.explorer.engines.model_routes import AdapterView
from tuneloop.explorer.engines.packing.wire import HEADER, PACKED
from tuneloop.explorer.engines.proof.fingerprint import (
    ProbeFindings,
    differing_from_files,
    has_adapter,
    mean_distance,
    number_of_adapter,
)
from tuneloop.explorer.engines.proof.vllm_worker import EXTENSION, INSTANCE_ID, METHOD
from tuneloop.explorer.engines.vllm_plugin import PACKS, UNPACKED
from tuneloop.shared.checkpoints import PROBE_LENGTH, PROBE_ROOM, Probe, VerifiedProbe
from tuneloop.shared.engine_flags import drafts, gates_renderer
from tuneloop.shared.errors import CheckpointRejected, EngineError
from tuneloop.shared.settings.hardware import api_servers_of, gpus_from
from tuneloop.shared.settings.serving import KEPT_ADAPTERS
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: Requested with every reply, and stripped again where the client did not request it.
CAPTURE: dict[str, object] = {"logprobs": True, "return_token_ids": True}

#: The same for text completions.
CAPTURE_TEXT: dict[str, object] = {"logprobs": 0, "return_token_ids": True}

#: Sampling parameters that leave the policy's distribution unchanged.
NEUTRAL_SAMPLING: dict[str, object] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}

_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1, "auto": 0.1}
#: On GPUs vLLM's attention multiplies float32 in TF32: 0.002 was measured on an H200.
_TF32_TOLERANCE = 1e-2

#: Seconds that an engine may take to say which instance it is, as it looks at the machine first; to swap its weights.
_ASK_S, _TIMEOUT_S = 30.0, 600.0
#: The ranks that vLLM accepts for --max-lora-rank.
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)

#: How often an adapter beside others is proven before it is wrong: others may take its place on the GPU meanwhile.
_PROOFS = 3

#: A host that there never will be (RFC 6761).
_NO_DOMAIN = "none.invalid"
#: The metric that says when the process began that answers, in seconds since 1970. Of several API servers none has it.
_START_TIME = "process_start_time_seconds"

#: The counters that move with each step of an engine, and how long it may take to return them, in seconds.
_STEPS = re.compile(r"^vllm:(?:iteration_tokens_total_sum|(?:prompt|generation)_tokens_total)(?:{.*})? (\S+)$", re.M)
_COUNT_S = 5.0

#: A metric that only engines have which draft tokens: speculative decoding.
_DRAFTS = "vllm:spec_decode_num_drafts"

#: Tokens that are sampled after a probe's prompt, to see whether its cached keys and values are those of the weights.
_PROBE_TOKENS = PROBE_ROOM // 2

#: Shorter than the five seconds after which uvicorn, and so an external engine, closes an idle connection.
_IDLE_TIMEOUT_S = 4.0
_JSON = {"content-type": "application/json"}
#: vLLM 0.32's CPU build loses its whole engine to a request with `seed`: "CPU Generator does not use offset".
UNSAFE_ON_CPU = frozenset({"seed"})


def command(settings: Settings, *, model: Path, socket: Path) -> list[str]:
    model_settings, rollout = settings.model, settings.explorer.rollout_model
    lora, servers = model_settings.lora, api_servers_of(settings)
    rank = lora.most_rank
    options: dict[str, object] = {
        "--model": model,
        "--served-model-name": settings.served_model_name,
        "--uds": socket,
        # Nothing that could be unpickled.
        "--load-format": "safetensors",
        "--dtype": rollout.dtype,
        "--seed": rollout.seed,
        "--tensor-parallel-size": rollout.tensor_parallel_size,
        "--max-model-len": model_settings.max_model_len,
        # The model's own generation_config.json may set top_p or top_k, which would make every reply untrainable.
        "--generation-config": "vllm",
        "--override-generation-config": json.dumps({"temperature": model_settings.temperature}),
        "--logprobs-mode": "processed_logprobs",
        "--tool-call-parser": rollout.tool_call_parser,
        "--reasoning-parser": rollout.reasoning_parser,
        "--kv-cache-memory-bytes": rollout.kv_cache_memory_bytes,
        "--gpu-memory-utilization": rollout.gpu_memory_utilization if settings.cluster.gpu_per_node else None,
        "--distributed-executor-backend": "uni" if rollout.single_process else None,
        "--max-lora-rank": min((each for each in _LORA_RANKS if each >= rank), default=rank) if rank else None,
        "--max-loras": lora.at_once if rank else None,
        "--max-cpu-loras": lora.in_main_memory if rank else None,
        "--worker-extension-cls": EXTENSION,
        "--api-server-count": servers if servers > 1 else None,
    }
    flags = {
        "--enable-auto-tool-choice": rollout.enable_auto_tool_choice,
        "--enforce-eager": rollout.enforce_eager,
        "--enable-lora": bool(rank),
        "--trust-remote-code": model_settings.trust_remote_code,
        "--disable-uvicorn-access-log": True,
        "--enable-scale-out": settings.explorer.rebuilds_grammars and gates_renderer(installed_version()),
    }
    return [
        sys.executable,
        "-P",
        "-m",
        # vLLM's own module for `python -m` ignores --api-server-count, and has no `serve`.
        "vllm.entrypoints.openai.api_server" if servers == 1 else "tuneloop.explorer.engines.vllm_plugin",
        *(part for option, value in options.items() if value is not None for part in (option, str(value))),
        # Without them the head gets an adapter too, and vLLM 0.32 on a CPU dies of prompt_logprobs of two
        # requests at once: "einsum(): subscript b has size 2".
        *(("--lora-target-modules", *model_settings.lora.targets) if rank else ()),
        # What clients may name by URL is in their requests when they come here; without a domain all would be fetched.
        *("--allowed-media-domains", _NO_DOMAIN),
        *(flag for flag, is_set in flags.items() if is_set),
        *rollout.engine_args,
    ]


def tolerance(settings: Settings) -> float:
    dtype = settings.explorer.rollout_model.dtype
    return _TF32_TOLERANCE if dtype == "float32" and settings.cluster.gpu_per_node else _TOLERANCE[dtype]


def environment(settings: Settings, number: int) -> dict[str, str]:
    """The environment of engine `number` on this machine, counted from 0."""
    variables, size = engine_variables(settings), settings.explorer.rollout_model.tensor_parallel_size
    if settings.cluster.gpu_per_node:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_from(number * size, size))
    return {**os.environ, **variables}


def engine_variables(settings: Settings) -> dict[str, str]:
    rollout = settings.explorer.rollout_model
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",
        **{"VLLM_NO_USAGE_STATS": "1", "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"},
        # vLLM starts modules of its own with `python -m`: none of them may come from the folder we were started in.
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        # Longer than we keep an idle connection: the engine never closes one that is just being used.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if rollout.single_process else "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if settings.model.lora.rank else "0",
        # What the processes of an engine say to each other stays on their machine.
        **{"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"},
        PACKS: os.environ.get(PACKS, "1"),
    }
    if not settings.cluster.gpu_per_node:
        defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", UNPACKED: "1"}
        variables |= {name: os.environ.get(name, value) for name, value in defaults.items()} | {"OMP_NUM_THREADS": "1"}
    return variables


def installed_version() -> str | None:
    """Which vLLM this environment has, under either of its names; None if it has none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def open_session(*, url: str | None, socket: str | None, key: str | None) -> httpx.AsyncClient:
    """A session for the weight routes of one engine, at a URL or on a Unix socket; past the environment's proxies."""
    address = url or "http://engine"
    # The machine's own certificates; without them, where there is no TLS, a session is made in no time.
    verify = ssl.create_default_context() if address.startswith("https:") else False
    limits = httpx.Limits(max_connections=100, keepalive_expiry=_IDLE_TIMEOUT_S)
    return httpx.AsyncClient(
        base_url=address,
        transport=httpx.AsyncHTTPTransport(uds=socket, verify=verify, limits=limits, trust_env=False),
        headers={"Authorization": f"Bearer {key}"} if key else None,
        timeout=httpx.Timeout(None, connect=10),
        trust_env=False,
    )


def probe_text() -> str:
    """Random words, always the same: what a model expects after them depends on its weights alone."""
    chance = random.Random(PROBE_LENGTH)
    return " ".join("".join(chance.choices(string.ascii_lowercase, k=6)) for _ in range(PROBE_LENGTH))


class EngineControl:
    #: Whether `load` changes the weights under what is in flight.
    loads_in_place = True
    rebuilds_grammars = False
    #: Whether it was started with speculative decoding. Of an engine of others it is not known.
    drafts = False
    renaming: ModelRenaming | None = None
    #: Whether its weights are proven by their fingerprint too; None: it is not known before it is asked.
    has_fingerprint: bool | None = None
    is_extended: bool | None = None
    proof = ""
    #: Whether it packs log-probabilities, which takes our plugin; None: it is not known.
    packs: bool | None = None
    #: Whether the fingerprint of all that it holds was right since its start, and loading changes but a part of that.
    base_is_proven = False
    #: The adapters that it holds for policies, by their versions.
    held: dict[int, AdapterView]
    #: The engine's numbers of adapters by their names, as far as these were found right.
    numbers: dict[str, str]
    #: The calls of weight routes that wait for an answer, and how many have had one.
    calls = answered = 0

    def __init__(self, session: httpx.AsyncClient, *, model_name: str, tolerance: float = 0.0) -> None:
        """`tolerance` is what the engine's own precision makes of log-probabilities, in nats."""
        self._session = session
        self._model_name = model_name
        self.tolerance = tolerance
        self.held, self.numbers = {}, {}

    async def healthy(self, timeout_s: float = 5.0) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                return (await self._session.get("/health")).status_code == 200
        except (httpx.HTTPError, TimeoutError):
            return False

    async def instance_id(self) -> str | None:
        """What differs between any two starts of the engine: when it began, or an id. Raises EngineError.

        None if it does not say: of several API servers none has a start time, and each an id of its own; without our
        extension its workers have none either; without dev mode there is no id.
        """
        # Without the slash at the end vLLM answers with all metrics.
        metrics = await self._get("/metrics/", **{"name[]": _START_TIME})
        if began := re.search(rf"^{_START_TIME} (\S+)$", metrics, re.MULTILINE):
            return began[1]
        if await self._has_fingerprint():
            return str(orjson.loads(await self._post("/collective_rpc", body={"method": INSTANCE_ID}))["results"])
        info = await self._get("/server_info", config_format="json")
        servers = re.search(r'"_api_process_count": ?(\d+)', info)
        found = re.search(r'"instance_id": ?"([^"]+)"', info)
        return found[1] if found and not (servers and int(servers[1]) > 1) else None

    async def drafts_tokens(self) -> bool:
        return self.drafts or _DRAFTS in await self._get("/metrics/")

    async def steps(self) -> float | None:
        """The sum of its counters of what it reads and samples; None where it does not return them, or not in time."""
        try:
            async with asyncio.timeout(_COUNT_S):
                metrics = (await self._session.get("/metrics/")).text
        except (httpx.HTTPError, TimeoutError):
            return None
        return sum(map(float, _STEPS.findall(metrics)), start=0.0) if "vllm:" in metrics else None

    async def find_plugin(self) -> None:
        body = {"model": self._model_name, "prompt": [0], "max_tokens": 1, **CAPTURE_TEXT}
        try:
            answer = await self._post("/v1/completions", body=body, headers={**_JSON, HEADER: PACKED})
            self.packs = PACKED in orjson.loads(answer)["choices"][0]["logprobs"]
        except (EngineError, LookupError, TypeError, ValueError) as error:  # an engine serves without it
            self.packs = None
            log.warning("plugin_not_asked_for", reason=repr(error))

    async def pause(self, mode: str) -> None:
        await self._post("/pause", params={"mode": mode, "clear_cache": "false"})

    def reset(self) -> None:
        self.has_fingerprint = self.is_extended
        self.base_is_proven = False

    def initial_weights(self, actor: Path) -> Path:
        return actor

    async def finish_start(self, actor: Path) -> None:
        """Load what an engine that was started with `initial_weights` lacks of `actor`."""

    def share_engine(self, other: "EngineControl") -> None:
        """Know another control of the same engine."""

    async def hold(self, version: int, actor: Path, probe: Probe) -> None:
        """Adapters alone can be held beside each other."""
        raise CheckpointRejected("policies need adapters, and model.lora.rank is 0")

    async def let_go(self, adapter: AdapterView) -> None:
        """Nothing is held."""

    async def prove_adapter(self, name: str, probe: Probe) -> "EngineControl":
        """A control that asks for an adapter, which is proven. Raises CheckpointRejected after several attempts."""
        named = self.asking(name)
        for proofs in range(1, _PROOFS + 1):
            try:
                await named.prove(probe)
                break
            except CheckpointRejected:
                if proofs == _PROOFS:
                    raise
        return named

    def asking(self, name: str | None) -> "EngineControl":
        """The same engine, asked by the name of an adapter that it has; None: the base model."""
        return self

    async def load(self, actor: Path) -> None:
        if is_adapter(actor):
            raise CheckpointRejected("the checkpoint is an adapter, and model.lora.rank is 0")
        await self._post("/collective_rpc", body={"method": "reload_weights", "kwargs": {"weights_path": str(actor)}})

    async def reset_prefix_cache(self) -> None:
        """Drop all cached keys and values of the old weights; paused requests recompute theirs with the new ones."""
        answer = await self._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if answer.replace(b" ", b"") == b'{"success":false}':
            raise EngineError("the engine kept its prefix cache")

    async def resume(self) -> None:
        await self._post("/resume")

    async def prove(self, probe: Probe) -> None:
        """Raise CheckpointRejected unless log-probabilities, through the cache too, and a fingerprint are right."""
        if problem := (await self.measure_probe(probe, base=False)).problem:
            raise CheckpointRejected(problem)

    async def measure_probe(self, probe: Probe, *, base: bool = True) -> ProbeFindings:
        """Compare the engine with the probe; without `base`, adapters alone. Raises CheckpointRejected."""
        try:
            prompt_ids, parts = list(probe.prompt_ids), None
            logprobs = await self._logprobs(prompt_ids)
            # Its log-probabilities with the prompt from its prefix cache, and without.
            choice = await self._complete(prompt=prompt_ids, max_tokens=_PROBE_TOKENS, ignore_eos=True, **CAPTURE_TEXT)
            ids, with_cache = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            without_cache = await self._logprobs([*prompt_ids, *ids])
            if isinstance(probe, VerifiedProbe) and probe.fingerprints and await self._has_fingerprint():
                base = base or not self.base_is_proven or not has_adapter(probe.fingerprints)
                options: dict[str, object] = {} if base else {"base": False}
                if others := [number for name, number in self.numbers.items() if name != self._model_name]:
                    options["but"] = others  # an engine stands still while it sums
                asked = {"method": METHOD} | ({"kwargs": options} if options else {})
                shares = orjson.loads(await self._post("/collective_rpc", body=asked))["results"]
                parts = differing_from_files(shares, probe.fingerprints, base=base)
                if parts == [] and has_adapter(probe.fingerprints):
                    self.numbers[self._model_name] = number_of_adapter(shares, probe.fingerprints)
            found = ProbeFindings(
                weights=mean_distance(logprobs, probe.logprobs),
                cache=mean_distance(with_cache, without_cache[-len(ids) :]),
                allowed=max(probe.tolerance, self.tolerance),
                parts=parts,
            )
            self.proof = found.proof
            self.base_is_proven = not self.loads_in_place and found.proof == "fingerprint"
            return found
        except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
            raise CheckpointRejected(f"the engine's answer to the probe cannot be read: {error!r}") from error

    async def _has_fingerprint(self) -> bool:
        """Whether its workers have our extension: one that is asked for a method that they lack may end."""
        if self.has_fingerprint is None:
            self.has_fingerprint = EXTENSION in await self._get("/server_info", config_format="json")
        return self.has_fingerprint

    async def cache_probe(self, probe: Probe) -> None:
        """Put the probe's prompt into the prefix cache, so that a cache that outlives its weights is noticed."""
        body = {"model": self._model_name, "prompt": list(probe.prompt_ids), "max_tokens": 1}
        await self._post("/v1/completions", body=body)

    async def create_probe(self) -> Probe:
        try:
            body = await self.query("/tokenize", prompt=probe_text())
            ids = body["tokens"][: min(PROBE_LENGTH, body["max_model_len"] - PROBE_ROOM)]
            return Probe(prompt_ids=tuple(ids), logprobs=tuple(await self._logprobs(ids)), tolerance=0.0)
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"/tokenize: its answer cannot be read: {error!r}") from error

    async def _logprobs(self, prompt_ids: list[int]) -> list[float]:
        """Of each id but the first, given those before it. vLLM does not use its prefix cache for this."""
        choice = await self._complete(prompt=prompt_ids, max_tokens=1, prompt_logprobs=0)
        rows = choice["prompt_logprobs"][1:]
        return [row[str(token)]["logprob"] for token, row in zip(prompt_ids[1:], rows, strict=True)]

    async def _complete(self, **fields: object) -> dict[str, Any]:
        body = {"model": self._model_name, "temperature": 1.0, **NEUTRAL_SAMPLING, **fields}
        choice: dict[str, Any] = orjson.loads(await self._post("/v1/completions", body=body))["choices"][0]
        return choice

    async def query(self, path: str, **fields: object) -> dict[str, Any]:
        """The engine's answer to a request of our own, which is not recorded. Raises EngineError."""
        try:
            reply: dict[str, Any] = orjson.loads(await self._post(path, body={"model": self._model_name, **fields}))
        except ValueError as error:
            raise EngineError(f"{path}: its answer is not JSON") from error
        return reply

    async def _get(self, path: str, **params: str) -> str:
        """The text of an answer, empty where the engine has no such route."""
        try:
            async with asyncio.timeout(_ASK_S):
                reply = await self._session.get(path, params=params)
        except (httpx.HTTPError, TimeoutError) as error:
            raise EngineError(f"{path}: {str(error) or type(error).__name__}") from error
        return reply.text if reply.status_code == 200 else ""

    async def _post(
        self,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = _JSON,
    ) -> bytes:
        # As ASCII: a prompt may contain a lone surrogate, which has no UTF-8.
        content, headers = (None, None) if body is None else (json.dumps(body).encode(), headers)
        self.calls += 1
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reply = await self._session.post(path, params=params, content=content, headers=headers)
        except (httpx.HTTPError, TimeoutError) as error:
            raise EngineError(f"{path}: {str(error) or type(error).__name__}") from error
        finally:
            self.calls, self.answered = self.calls - 1, self.answered + 1
        if reply.status_code >= 300:
            raise EngineError(f"{path}: {reply.status_code} {reply.content[:300].decode(errors='replace')}")
        return reply.content


class AdapterControl(EngineControl):
    """The same where versions are adapters, side by side under names of their own: nothing in flight changes."""

    loads_in_place = False

    def __init__(self, session: httpx.AsyncClient, *, model_name: str, tolerance: float, base: Path) -> None:
        super().__init__(session, model_name=model_name, tolerance=tolerance)
        self._public_name, self._base = model_name, base
        self._loaded: list[str] = []
        #: How often it was forgotten what is loaded.
        self._resets = 0
        #: The controls of the same engine, this one among them.
        self._same_engine = [self]

    def share_engine(self, other: EngineControl) -> None:
        assert isinstance(other, AdapterControl)
        self._same_engine = other._same_engine
        self._same_engine.append(self)

    def reset(self) -> None:
        super().reset()
        self._resets += 1
        self._loaded.clear()
        self.held.clear()
        self.numbers.clear()
        self._use(None)

    def initial_weights(self, actor: Path) -> Path:
        self.reset()
        return self._base

    async def finish_start(self, actor: Path) -> None:
        await self.load(actor)

    async def pause(self, mode: str) -> None:
        """Nothing to do: a new adapter changes nothing that is in flight or cached."""

    async def reset_prefix_cache(self) -> None:
        """Nothing to do: a new adapter changes nothing that is in flight or cached."""

    async def resume(self) -> None:
        """Nothing to do: nothing was paused."""

    async def load(self, actor: Path) -> None:
        if is_adapter(actor):
            name = await self._load(actor)
            self._loaded[:] = [*(each for each in self._loaded if each != name), name]
            while len(self._loaded) > KEPT_ADAPTERS:
                await self._unload(self._loaded.pop(0))
            self._use(name)
        elif actor == self._base:
            self._use(None)
        else:
            raise CheckpointRejected("the checkpoint holds full weights, and model.lora.rank is not 0")

    async def hold(self, version: int, actor: Path, probe: Probe) -> None:
        """Have a policy's version beside the others, proven under its adapter's name. Verify it first.

        Raises EngineError, and CheckpointRejected where it is not what it should be; then it is not held.
        """
        if not is_adapter(actor):
            raise CheckpointRejected("the checkpoint holds full weights, and model.lora.rank is not 0")
        resets, name = self._resets, await self._load(actor)
        try:
            named = await self.prove_adapter(name, probe)
            if resets != self._resets:
                raise EngineError("it was started again while it loaded an adapter")
        except BaseException:
            await self._unload(name)
            raise
        assert named.renaming is not None
        self.held[version] = AdapterView(version, named.renaming, named.proof)

    def asking(self, name: str | None) -> EngineControl:
        named = copy.copy(self)
        named._use(name)
        return named

    async def let_go(self, adapter: AdapterView) -> None:
        await self._unload(adapter.renaming.adapter_name)

    async def _load(self, actor: Path) -> str:
        name = adapter_name_of(actor)
        try:
            await self._post("/v1/load_lora_adapter", body={"lora_name": name, "lora_path": str(actor)})
        except EngineError as error:
            if '"Not Found"' in str(error):
                how = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                raise EngineError(f"the engine accepts no adapters; start it with {how}") from error
            if "already been loaded" not in str(error):  # by an explorer before us, and it is the same
                raise
        return name

    async def _unload(self, name: str) -> None:
        """Unload an adapter, unless another request needs it."""
        held = {view.renaming.adapter_name for each in self._same_engine for view in each.held.values()}
        if name in held or any(name in each._loaded for each in self._same_engine):
            return
        self.numbers.pop(name, None)
        try:
            await self._post("/v1/unload_lora_adapter", body={"lora_name": name})
        except EngineError as error:
            log.warning("adapter_not_unloaded", adapter=name, reason=str(error))

    def _use(self, name: str | None) -> None:
        self._model_name = name or self._public_name
        self.renaming = ModelRenaming(public_name=self._public_name, adapter_name=name) if name else None


def control_of(settings: Settings, session: httpx.AsyncClient, *, tolerance: float) -> EngineControl:
    name, rollout = settings.served_model_name, settings.explorer.rollout_model
    if settings.model.lora.rank:
        base = settings.model.model_path.absolute()
        control: EngineControl = AdapterControl(session, model_name=name, tolerance=tolerance, base=base)
    else:
        control = EngineControl(session, model_name=name, tolerance=tolerance)
    control.rebuilds_grammars = settings.explorer.rebuilds_grammars
    control.drafts = drafts(rollout.engine_args)
    # Of an engine of ours it is known; of another one it is asked.
    extended = None if rollout.engine_urls else "--worker-extension-cls" not in " ".join(rollout.engine_args)
    control.has_fingerprint = control.is_extended = extended
    return control
