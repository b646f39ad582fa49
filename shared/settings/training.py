"""Settings of what learns: the trainer, what it takes from the ledger, and how versions are published."""

from typing import Any, Literal

from pydantic import Field

from tuneloop.shared.settings.database_url import DatabaseUrl
from tuneloop.shared.settings.types import AtLeastTwo, FileMode, FolderName, NotNegative, Positive, Seconds, Section

_TOKENS = 8192


class TrainerSettings(Section):
    """The service that trains."""

    save_interval: Positive = 1
    state_interval: Positive = 1
    max_checkpoints_to_keep: NotNegative = 5
    keep_interval: Positive | None = None
    checkpoint_mode: FileMode = "0600"
    save_hf_checkpoint: Literal["always", "never", "last"] = "always"
    ulysses_sequence_parallel_size: Positive = 1
    trainer_config: dict[str, Any] = Field(default_factory=dict)
    workers: Positive | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: NotNegative = 42
    micro_batch_tokens: Positive | None = None
    activation_checkpointing: bool | None = None
    compile: bool | None = None
    yield_to_traffic: bool = False
    longest_yield: Seconds | None = None
    poll_interval: Seconds = 1.0
    max_staleness: NotNegative | None = None
    max_age: Seconds | None = None
    total_steps: Positive | None = None

    @property
    def tokens_at_once(self) -> int:
        """`micro_batch_tokens`, or what it is on a CPU and until the trainer has chosen."""
        return self.micro_batch_tokens or _TOKENS


class ExperienceBufferSettings(Section):
    """Where experiences are kept. `path` is a database URL; without one, an SQLite file in the job folder."""

    name: FolderName = "exp_buffer"
    storage_type: Literal["sql"] = "sql"
    path: DatabaseUrl | None = None


class TrainerInputSettings(Section):
    """Trinity's nesting around the experience buffer."""

    experience_buffer: ExperienceBufferSettings = ExperienceBufferSettings()


class BufferSettings(Section):
    """The batch and its source."""

    train_batch_size: Positive = 32
    order: Literal["oldest", "freshest", "priority"] = "oldest"
    fair_share: bool = True
    group_by: Literal["none", "run", "task", "preference"] = "none"
    group_size: AtLeastTwo = 8
    group_timeout: Seconds = 3600.0
    batch_timeout: Seconds | None = None
    max_backlog: Positive | None = 8
    trainer_input: TrainerInputSettings = TrainerInputSettings()


class SynchronizerSettings(Section):
    """How weights reach the engines: by checkpoint on the shared file system."""

    sync_method: Literal["checkpoint"] = "checkpoint"
    sync_interval: Positive = 1
