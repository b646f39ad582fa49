"""Settings of what answers: the model, the machines, the explorer and its engines."""

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
    Seconds,
    Secret,
    Section,
    Share,
)

#: What the linear layers of most models are called: all of attention and of the feed-forward part.
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


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
    startup_timeout: Seconds = 900.0
    health_timeout: Seconds = 10.0


class ExplorerSettings(Section):
    """The service that answers requests."""

    rollout_model: RolloutModelSettings = RolloutModelSettings()
    listen_address: str = "0.0.0.0"  # Trinity's default: apps on other hosts reach the proxy
    proxy_port: Port = 8010
    workers: Positive = 1
    service_status_check_interval: Seconds = 60.0
    probe_interval: Seconds = 300.0
    request_timeout: Seconds = 3600.0
    max_in_flight: Positive = 1024
    max_waiting: NotNegative = 1024
    wait_timeout: Seconds = 60.0
    on_reload: Literal["keep", "wait"] = "keep"
    min_running_model_num: NotNegative | None = None
    prefix_affinity: bool = True
    train_on_grammars: bool = True
    durability: Literal["fsync", "write"] = "fsync"
    spool_dir: Path | None = None
    spool_max_bytes: Positive = 1 << 30
    spool_max_age: Seconds = 86400.0
    max_body_bytes: Positive = 16 << 20
    admin_key: HardToGuess | None = None
    version_pins: bool = False

    @property
    def rebuilds_grammars(self) -> bool:
        """Whether the trainer rebuilds the grammars that engines enforce, to train on what they held."""
        return self.train_on_grammars and engine_flags.rebuilds_grammars(self.rollout_model.engine_args)
