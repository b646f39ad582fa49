"""Settings of what answers: the model, the machines, the explorer and its engines."""

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

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


class LoraSettings(Section):
    """A low-rank adapter; `rank: 0` trains all weights instead. An `alpha` of null is twice the rank."""

    rank: NotNegative = 0
    alpha: Positive | None = None
    targets: tuple[str, ...] = _LINEAR

    @property
    def alpha_used(self) -> int:
        """The adapter's alpha: what it adds is scaled by alpha over rank."""
        return self.alpha or 2 * self.rank


class ModelSettings(Section):
    """The model that is served and trained."""

    model_path: Path
    critic_model_path: Path | None = None
    served_model_name: str | None = None
    max_model_len: Positive | None = None
    max_response_tokens: Positive | None = None
    temperature: NotNegativeReal = 1.0
    trust_remote_code: bool = False
    lora: LoraSettings = LoraSettings()


class ClusterSettings(Section):
    """The machines. `gpu_per_node: 0` means no GPU: everything runs on the CPU."""

    node_num: Positive = 1
    gpu_per_node: NotNegative = 0
    ray_address: str = "auto"


class RolloutModelSettings(Section):
    """The vLLM engines that the explorer starts, or attaches to by `engine_urls`."""

    engine_num: Positive = 1
    tensor_parallel_size: Positive = 1
    api_servers: Positive | None = None
    enable_openai_api: bool = True
    enable_history: bool = True
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "bfloat16"
    seed: NotNegative = 42
    gpu_memory_utilization: Share = 0.9
    enforce_eager: bool = False
    single_process: bool = False
    kv_cache_memory_bytes: Positive | None = None
    engine_urls: tuple[Address, ...] = ()
    engine_key: Secret | None = None
    engine_args: tuple[str, ...] = ()
    spare_place: bool | None = None
    startup_timeout: Seconds = 900.0
    health_timeout: Seconds = 10.0

    @property
    def gpus_of_engines(self) -> int:
        """GPUs that engines of our own take."""
        return 0 if self.engine_urls else self.engine_num * self.tensor_parallel_size

    def contradictions(self, *, adapters: bool) -> Iterator[str]:
        """What does not fit together, in sentences; `adapters`: versions are some."""
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
        for problem in engine_flags.problems_of(self.engine_args):
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
    share: Share = 0.05
    max_mismatch: PositiveReal = 0.01

    @property
    def captured_share(self) -> float:
        """The share of replies that engines are asked for them, whoever wants them: the others are held against it."""
        return {"all": 1.0, "share": self.share, "none": LEAST_CAPTURED}[self.logprobs]


class ExplorerSettings(Section):
    """The service that answers requests."""

    rollout_model: RolloutModelSettings = RolloutModelSettings()
    listen_address: str = "127.0.0.1"  # not Trinity's default: that lets every host in that reaches this one
    allowed_hosts: tuple[str, ...] = ()
    insecure: bool = False
    cors_allow_origins: tuple[str, ...] = ()
    proxy_port: Port = 8010
    workers: Positive = 1
    service_status_check_interval: Seconds = 60.0
    probe_interval: Seconds = 300.0
    request_timeout: Seconds = 3600.0
    max_choices: Positive = 1024
    max_in_flight: Positive = 1024
    max_waiting: NotNegative = 1024
    wait_timeout: Seconds = 60.0
    on_reload: Literal["keep", "wait", "restart"] = "keep"
    min_running_model_num: NotNegative | None = None
    prefix_affinity: bool = True
    train_on_grammars: bool = True
    capture: CaptureSettings = CaptureSettings()
    durability: Literal["fsync", "write"] = "fsync"
    spool_dir: Path | None = None
    spool_max_bytes: Positive = 1 << 30
    spool_max_age: Seconds = 86400.0
    max_body_bytes: Positive = 16 << 20
    max_held_bytes: Positive = 512 << 20
    head_timeout: Seconds = 30.0
    body_timeout: Seconds = 300.0
    max_connections: Positive | None = None
    allowed_media_domains: tuple[str, ...] = ()
    admin_key: HardToGuess | None = None
    version_pins: bool = False

    @property
    def rebuilds_grammars(self) -> bool:
        """Whether the trainer rebuilds the grammars that engines enforce, to train on what they held."""
        return self.train_on_grammars and engine_flags.rebuilds_grammars(self.rollout_model.engine_args)

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
                " false: while one engine is started anew, the others answer"
            )
