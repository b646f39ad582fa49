"""Settings of what learns: the trainer, what it takes from the ledger, and how versions are published."""

from typing import Literal

from tuneloop.shared.settings.database_url import DatabaseUrl
from tuneloop.shared.settings.types import (
    AtLeastTwo,
    FileMode,
    FolderName,
    Fraction,
    NotNegative,
    Positive,
    Seconds,
    Section,
)

_TOKENS = 8192


class TrainerSettings(Section):
    """The service that trains."""

    save_interval: Positive = 1
    """Steps between two versions. _Train._"""
    async_save: bool | None = None
    """Publish a version while the next steps are made, from a copy in main memory. null: on a GPU. _Train._"""
    max_checkpoints_to_keep: NotNegative = 5
    """Newest versions whose weights are kept; 0: all. [Those that are needed](versions.md#what-is-kept) are never
    deleted. _Train._"""
    keep_interval: Positive | None = None
    """Also keep the weights of versions whose step is a multiple of this; null: of none. _Train._"""
    checkpoint_mode: FileMode = "0600"
    """The mode of checkpoint files: `0600` for the trainer's user alone. Another user's explorer needs `0640`, another
    user's second trainer `0660`, in one group. _Train._"""
    ulysses_sequence_parallel_size: Positive = 1
    """Workers that read each row together, for sequences too long for one GPU. It must divide `workers` and the model's
    heads. _Train._"""
    workers: Positive | None = None
    """Processes that [share each step](several_machines.md#several-gpus), a GPU each. null: one for each GPU that no
    engine takes. _Train._"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer computes. `auto`: on the CPU if `gpu_per_node` is 0, else on the GPUs after the engines'.
    _Train._"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The models' number format; `auto`: bfloat16 on GPUs, float32 on the CPU. The optimiser works in float32.
    _Train._"""
    seed: NotNegative = 42
    """The trainer's seed. _Train._"""
    micro_batch_tokens: Positive | None = None
    """Tokens of one pass of the model. null: as many [as the memory holds](one_machine.md#disk-and-memory), up to
    32768. Without memory it is halved, with the same result. _Train._"""
    activation_checkpointing: bool | None = None
    """Compute activations again in the backward pass: a third more work, much less memory. null: where nothing fits
    without. _Train._"""
    compile: bool | None = None
    """Compile the layers with `torch.compile`: a third less time on a GPU, after a slow first step. null: on a GPU
    with a C compiler. _Train._"""
    optimizer_offload: bool = False
    """Keep AdamW in [main memory](one_machine.md#disk-and-memory): 12 bytes a weight less of a GPU. _Train._"""
    allow_routing_mismatch: bool = False
    """Train a [mixture of experts](architectures.md#mixtures-of-experts), whose experts engine and trainer may choose
    differently. _Train._"""
    yield_to_traffic: bool = False
    """Wait before each micro-batch until no request has been in flight for 0.6 s, where engine and trainer share a
    GPU. The same for both services. _Train._"""
    poll_interval: Seconds = 1.0
    """Seconds between two checks for a full batch. _Train._"""
    max_staleness: NotNegative | None = None
    """Committed replies that were sampled more than so many versions ago expire; null: none. _Train._"""
    total_steps: Positive | None = None
    """Stop after so many steps; null: no limit. _Train._"""

    @property
    def tokens_at_once(self) -> int:
        """`micro_batch_tokens`, or what it is on a CPU and until the trainer has chosen."""
        return self.micro_batch_tokens or _TOKENS


class ExperienceBufferSettings(Section):
    """Where experiences are kept. `path` is a database URL; without one, an SQLite file in the job folder."""

    name: FolderName = "exp_buffer"
    """The file `buffer/{name}.db` in the job folder, or the schema on PostgreSQL."""
    path: DatabaseUrl | None = None
    """URL of the database: `postgresql://user:password@host/database` or `sqlite:////folder/file.db`; null: an SQLite
    file in the job folder."""


class TrainerInputSettings(Section):
    """Trinity's nesting around the experience buffer."""

    experience_buffer: ExperienceBufferSettings = ExperienceBufferSettings()


class BufferSettings(Section):
    """The batch and its source."""

    train_batch_size: Positive = 32
    """Experiences of one step. _Train._"""
    commit: Literal["auto", "manual"] = "manual"
    """How rewarded replies are released to the trainer: by `POST /commit` (`manual`), or
    [automatically](feedback.md#commit) as well (`auto`). _Serve._"""
    order: Literal["oldest", "freshest", "priority"] = "oldest"
    """Which committed experiences come first: the oldest, the newest, or the highest `metadata.priority`. _Train._"""
    group_by: Literal["none", "run", "task", "preference"] = "none"
    """What is [trained on together](concepts.md#batches): the calls of a `run`, all runs of a `task`, the replies of a
    `preference`, or nothing. _Train._"""
    group_size: AtLeastTwo = 8
    """Runs that make a group of `task` complete, once none of its replies waits for feedback or a commit. _Train._"""
    group_timeout: Seconds = 3600.0
    """Seconds after a group's first commit when it is trained on incomplete; a lone run of a task expires then.
    _Train._"""
    whole_groups_only: bool = False
    """Train on a group of `task` only with all `group_size` runs. _Train._"""
    batch_timeout: Seconds | None = None
    """Seconds after the oldest commit when a smaller batch is taken; null: a step waits until there is enough.
    _Train._"""
    max_backlog: Positive | None = 8
    """Batches that may wait when a version is registered; [further ones expire](concepts.md#what-is-too-much), the
    oldest first. null: everything waits. _Train._"""
    record_share: Fraction = 1.0
    """Share of the traffic that is recorded, by whole runs; `store: true` always is. Feedback on the rest is
    `not_recorded`. _Serve._"""
    trainer_input: TrainerInputSettings = TrainerInputSettings()
