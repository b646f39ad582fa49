"""Settings of what answers: the model, the machines, the explorer and its engines."""

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from tuneloop.shared import engine_flags
from tuneloop.shared.settings.types import (
    Address,
    HardToGuess,
    NotNegative,
    NotNegativeReal,
    Port,
    Positive,
    PositiveReal,
    Seconds,
    Secret,
    Section,
    Share,
    Small,
)

#: The share of replies that are captured to be compared where none were asked for.
LEAST_CAPTURED = 0.01

#: What the linear layers of most models are called: all of attention and of the feed-forward part.
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own, which no other one reaches.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "localhost.evil.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


#: Adapters of the default policy that stay loaded: the version served and those before it, for a rollback.
KEPT_ADAPTERS = 4

#: At least the newest, and those that older replies are still sampled from; at most what a GPU has room for.
_LEAST_AT_ONCE, _MOST_AT_ONCE = 4, 64


class LoraSettings(Section):
    """A low-rank adapter; `rank: 0` trains all weights instead. An `alpha` of null is twice the rank."""

    rank: NotNegative = 0
    """Train a [low-rank adapter](policies.md#adapters) of this rank; 0 trains all weights. On GPUs in bfloat16 or
    float16 only. The rank of an experiment stays."""
    alpha: Positive | None = None
    """What the adapter adds is scaled by alpha over rank. null: twice the rank."""
    targets: tuple[str, ...] = _LINEAR
    """Layers that the adapter is added to, by the last part of their names: linear layers, but not `lm_head`."""

    base_bits: Literal[8, 4] | None = None
    """Bits a weight of the base's layers in the trainer: 8, or 4 (QLoRA's NF4): [less GPU memory, slower
    steps](policies.md#adapters). null: `trainer.dtype`. _Train._"""

    max_rank: Positive | None = None
    """The largest rank that a [policy](policies.md) may have; null: `rank`. Engines keep room for it. _Serve._"""
    resident: Positive = 8
    """Adapters that an engine holds at once; the least recently used [is unloaded](policies.md).
    _Serve._"""

    @property
    def most_rank(self) -> int:
        """The largest rank of an adapter; 0 if all weights are trained."""
        return max(self.rank, self.max_rank or 0) if self.rank else 0

    @property
    def at_once(self) -> int:
        """How many adapters may sample at the same time: an engine has room for so many on its GPU."""
        return min(max(self.resident, _LEAST_AT_ONCE), _MOST_AT_ONCE)

    @property
    def in_main_memory(self) -> int:
        """How many an engine keeps in main memory. Two of it may serve the default policy: one of its versions each."""
        return self.resident + 2 * KEPT_ADAPTERS

    @property
    def alpha_used(self) -> int:
        """The adapter's alpha: what it adds is scaled by alpha over rank."""
        return self.alpha or 2 * self.rank


class AliasSettings(Section):
    """Another name of the model."""

    train: bool = True
    """Whether replies to requests under this name may be trained on."""


class ModelSettings(Section):
    """The model that is served and trained."""

    model_path: Path
    """Folder of the base model in Hugging Face's format, or its name on the Hub, once `hf download` has it. It is
    version 0."""
    served_model_name: str | None = None
    """The name that clients send as `model`; null: `model_path` as written. _Serve._"""
    aliases: dict[str, AliasSettings] = Field(default_factory=dict)
    """[Other names](clients.md#other-names) of the model: `{claude-haiku-4-5: {train: false}, gpt-4o-mini: {}}`.
    `train: false` keeps the replies out of training. _Serve._"""
    max_model_len: Positive | None = None
    """Tokens of prompt and reply together; null: what the model's own configuration says."""
    max_response_tokens: Positive | None = None
    """Tokens of a reply whose request sets no limit; null: the rest of `max_model_len`."""
    temperature: NotNegativeReal = 1.0
    """Temperature of a request that sets none. _Serve._"""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models that you trust."""
    lora: LoraSettings = LoraSettings()


class ClusterSettings(Section):
    """The machines. `gpu_per_node: 0` means no GPU: everything runs on the CPU."""

    node_num: Positive = 1
    """Machines. 1: engines are started on this one. More: [Ray places them](several_machines.md#ray)."""
    gpu_per_node: NotNegative = 0
    """GPUs of a machine. 0: everything runs on the CPU."""
    ray_address: str = "auto"
    """The Ray cluster, `host:port`, that places engines, and the workers of mode `train`; `auto`: the one that this
    machine belongs to."""


class RolloutModelSettings(Section):
    """The vLLM engines that the explorer starts, or attaches to by `engine_urls`."""

    engine_num: Positive = 1
    """vLLM engines to start. _Serve._"""
    tensor_parallel_size: Positive = 1
    """GPUs of one engine. The engines take the first GPUs, or the first of `CUDA_VISIBLE_DEVICES`. _Serve._"""
    api_servers: Positive | None = None
    """vLLM's API processes for each engine. null: on GPUs half of the cores over the engines, at most 4; else, and
    with adapters, 1. _Serve._"""
    enable_auto_tool_choice: bool = False
    """vLLM's `--enable-auto-tool-choice`: the model may call tools. It needs `tool_call_parser`. _Serve._"""
    tool_call_parser: str | None = None
    """vLLM's `--tool-call-parser`, such as `hermes`. _Serve._"""
    reasoning_parser: str | None = None
    """vLLM's `--reasoning-parser`, such as `qwen3`. _Serve._"""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "bfloat16"
    """The engines' number format. _Serve._"""
    seed: NotNegative = 42
    """The engines' seed. _Serve._"""
    gpu_memory_utilization: Share = 0.9
    """Share of a GPU's memory that an engine takes. Beside the trainer on one GPU at most 0.5: write 0.4. _Serve._"""
    enforce_eager: bool = False
    """No CUDA graphs: a faster start, slower replies. _Serve._"""
    single_process: bool = False
    """Run an engine in one process instead of several: less memory, for small models. _Serve._"""
    kv_cache_memory_bytes: Positive | None = None
    """Bytes of an engine's key-value cache; null: what `gpu_memory_utilization` leaves. _Serve._"""
    engine_urls: tuple[Address, ...] = ()
    """[Engines that run already](architectures.md#engines-of-others): `[http://host:port, …]`. None is started then.
    They must see the job folder, and only the explorer may reach them. _Serve._"""
    engine_key: Secret | None = None
    """The key that `engine_urls` need. _Serve._"""
    engine_args: tuple[str, ...] = ()
    """More arguments for every engine: `[--max-num-seqs, "64"]`. Those that [change what replies are sampled
    from](explain.md#what-the-engine-adds) are refused. _Serve._"""
    spare_place: bool | None = None
    """Whether a [fresh engine](versions.md#fresh-engines) has room beside the others. null: measured. `true` with
    one GPU: both share it, so `gpu_memory_utilization` must be below a half. _Serve._"""

    #: Seconds that an engine gets to become ready: a large model from a slow disk, compiled, takes some minutes.
    startup_timeout: ClassVar[float] = 900.0
    #: Seconds that a ready engine gets to say that it is healthy: a busy one takes some, and one that hangs never does.
    health_timeout: ClassVar[float] = 10.0

    @property
    def gpus_of_engines(self) -> int:
        """GPUs that engines of our own take."""
        return 0 if self.engine_urls else self.engine_num * self.tensor_parallel_size

    def contradictions(self, *, adapters: bool, on_cpu: bool) -> Iterator[str]:
        """What does not fit together, in sentences; `adapters`: versions are some; `on_cpu`: engines have no GPU."""
        if self.enable_auto_tool_choice and not self.tool_call_parser and not self.engine_urls:
            yield (
                "explorer.rollout_model.enable_auto_tool_choice: needs explorer.rollout_model.tool_call_parser, such as"
                " hermes"
            )
        several = (self.api_servers or 1) > 1 and not self.engine_urls
        if several and self.single_process:
            yield (
                "explorer.rollout_model.api_servers: an engine of a single process has one API server; write 1, or "
                "explorer.rollout_model.single_process: false"
            )
        if several and adapters:
            yield (
                "explorer.rollout_model.api_servers: vLLM loads adapters while it serves through one API server only;"
                " write 1, or model.lora.rank: 0"
            )
        for problem in engine_flags.problems_of(self.engine_args, on_cpu=on_cpu and not self.engine_urls):
            yield f"explorer.rollout_model.engine_args: {problem}"

    def spare_places(self, cluster: ClusterSettings, *, spare_gpus: bool) -> int:
        """So many engines may be started beside `engine_num`, to take the place of one of them."""
        if self.engine_urls:
            return 0
        if self.spare_place is None and (cluster.gpu_per_node or cluster.node_num > 1):
            return int(cluster.node_num == 1 and spare_gpus)
        return int(self.spare_place is not False)


class CaptureSettings(Section):
    """Of which replies engines are asked for log-probabilities; of the others the trainer recomputes them."""

    logprobs: Literal["all", "share", "none"] = "all"
    """Replies for which [engines](architectures.md#engines-of-others) return log-probabilities, at a cost:
    `all`, a `share`, or one in a hundred (`none`). The trainer recomputes the others. The same for both services."""
    share: Share = 0.05
    """The share of the time in which `share` captures all replies."""
    max_mismatch: PositiveReal = 0.01
    """How far recomputed log-probabilities may diverge from captured ones, in nats a token (k3).
    Beyond it `capture_mismatch` is raised, and all are captured. _Train._"""

    @property
    def captured_share(self) -> float:
        """The share of replies that engines are asked for them, for any use: the others are held against it."""
        return {"all": 1.0, "share": self.share, "none": LEAST_CAPTURED}[self.logprobs]


class ExplorerSettings(Section):
    """The service that answers requests."""

    rollout_model: RolloutModelSettings = RolloutModelSettings()
    listen_address: str = "127.0.0.1"  # not Trinity's default: that lets every host in that reaches this one
    """The address to listen on: `127.0.0.1` is this machine only, `0.0.0.0` all addresses, which needs [keys](keys.md).
    _Serve._"""
    allowed_hosts: tuple[str, ...] = ()
    """Host names beside `localhost` for [callers without a key](keys.md#without-keys). _Serve._"""
    insecure: bool = False
    """Allow requests without a key, and a Ray cluster without a token: for isolated laboratories."""
    cors_allow_origins: tuple[str, ...] = ()
    """Origins, such as `https://app.example.com`, whose pages may send [feedback from a
    browser](keys.md#feedback-from-a-browser). _Serve._"""
    cors_inference_origins: tuple[str, ...] = ()
    """Origins whose pages may ask the model; `["*"]`: all. _Serve._"""
    proxy_port: Port = 8010
    """The port to listen on. 0: a free one, which the log names. _Serve._"""
    workers: Positive | None = None
    """[Processes that answer requests](several_machines.md#how-it-grows). null: 1; with GPUs a quarter of the cores, at
    most 2 for each engine. _Serve._"""
    service_status_check_interval: Seconds = 60.0
    """Seconds between two checks for a new version. _Serve._"""
    request_timeout: Seconds = 3600.0
    """Seconds that a reply may take: [Limits](limits.md). _Serve._"""
    max_choices: Small = 1024
    """Choices that a request may ask for: prompts times `n`, which is at most 128. _Serve._"""
    max_in_flight: Positive = 1024
    """Requests that are answered at once; others wait. _Serve._"""
    max_waiting: NotNegative = 1024
    """Requests that may wait for that; others get 429. _Serve._"""
    on_reload: Literal["keep", "wait", "restart"] = "keep"
    """[Replies in flight](versions.md#what-waits-while-weights-are-swapped) at new weights: `keep` pauses them, `wait`
    lets them end first, `restart` starts a [fresh engine](versions.md#fresh-engines) (not with `engine_urls`).
    _Serve._"""
    capture: CaptureSettings = CaptureSettings()
    outbox_dir: Path | None = None
    """Folder of the explorer's outbox; null: `outbox` in the job folder. Best a local disk that outlives the service.
    _Serve._"""
    outbox_max_bytes: Positive = 1 << 30
    """Bytes that may wait in the outbox. Beyond it, or with less than 5 % of the disk free (at most 1 GiB), requests
    get 503. _Serve._"""
    clamp_max_tokens: bool = False
    """Lower a request's `max_tokens` to the model's context (`x-tuneloop-clamped`), instead of refusing it as vLLM
    does. _Serve._"""
    max_body_bytes: Positive = 16 << 20
    """Bytes of the largest request. _Serve._"""
    max_held_bytes: Positive = 512 << 20
    """Bytes of requests and large answers in a worker; beyond it requests get 503. _Serve._"""
    head_timeout: Seconds = 30.0
    """Seconds until a request's headers are complete. _Serve._"""
    body_timeout: Seconds = 300.0
    """Seconds until a request's body is complete. _Serve._"""
    max_connections: Positive | None = None
    """Connections to a worker; beyond it the longest idle one is closed. null: by its open files. _Serve._"""
    admin_key: HardToGuess | None = None
    """A [key](keys.md) with the scope `admin`, of at least 16 ASCII characters; null: none. _Serve._"""
    version_pins: bool = False
    """Let clients [name the version](clients.md#one-version) that answers them: `model: "<name>@<version>"`.
    _Serve._"""

    #: Seconds between two proofs that an engine has the weights it should have: each costs it one short request.
    probe_interval: ClassVar[float] = 300.0
    #: Seconds that a request waits at most to be answered: clients stop waiting or try again after about as long.
    wait_timeout: ClassVar[float] = 60.0
    #: Whether the next turn of a conversation goes to the engine that answered the last one, whose prefix cache has it.
    prefix_affinity: ClassVar[bool] = True
    #: Seconds that a record may wait in the outbox for the database: a day, in which a person sees the alarms.
    outbox_max_age: ClassVar[float] = 86400.0
    #: Engines that go on answering while another one takes new weights. None: 1 with `rollout.mode: rolling`, else 0.
    min_running_model_num: ClassVar[int | None] = None

    @property
    def rebuilds_grammars(self) -> bool:
        """Whether the trainer rebuilds the grammars that engines enforce, to train on what they held."""
        return engine_flags.rebuilds_grammars(self.rollout_model.engine_args)

    def why_exposed(self, *, has_keys: bool) -> str | None:
        """Why it must not serve: strangers could come in without a key. None where they cannot, or may."""
        if has_keys or self.admin_key is not None or self.insecure or is_loopback(self.listen_address):
            return None
        return (
            f"explorer.listen_address: {self.listen_address} is open to other machines, and there is no key: make one"
            " with `tuneloop keys create --config X.yaml --name NAME`, or write 127.0.0.1, or explorer.insecure: true"
            " (--insecure) in a laboratory that no stranger reaches"
        )

    def contradictions(self, cluster: ClusterSettings, *, serves: bool, spare_gpus: bool) -> Iterator[str]:
        """What does not fit together where it `serves`, in sentences."""
        rollout = self.rollout_model
        if not serves:
            return
        if rollout.engine_urls and self.on_reload == "restart":
            yield (
                "explorer.on_reload: restart needs engines that the explorer starts, and those of"
                " explorer.rollout_model.engine_urls are others'. Write keep or wait, or engine_num in place of them"
            )
        one = rollout.engine_num == 1 or cluster.node_num > 1
        if rollout.spare_place and cluster.gpu_per_node and not one and not spare_gpus:
            yield (
                "explorer.rollout_model.spare_place: no GPUs are left for it beside those of several engines. Write"
                " false: while one engine is started again, the others answer"
            )
