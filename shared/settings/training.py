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
    """Steps between two versions: every so many optimiser steps a version is published, and served from then on. 1:
    after each. _Train._"""
    async_save: bool | None = None
    """Publish a version while the next steps are made, from a copy
    of its weights in main memory. One at a time: of steps that are faster than the disk, a version has more than
    `save_interval`. Not where the trainer examines versions for the gate. null: on a GPU. _Train._"""
    max_checkpoints_to_keep: NotNegative = 5
    """Newest versions whose weights are kept; 0: all. The one that is served and the one to go on from are never
    deleted. Only the latter keeps [critic and optimiser](operations.md#disk-and-memory). _Train._"""
    keep_interval: Positive | None = None
    """Besides the newest, the weights of versions whose step is a multiple of this are kept; null: of none. _Train._"""
    checkpoint_mode: FileMode = "0600"
    """The rights of a checkpoint's files, in octal, whatever the umask; its folders, and the job folder, can be entered
    by who may read them. The SQLite file, logs and marks of either service are open to its group as these are, and to
    nobody else; the outbox is its explorer's alone. `0600`: the trainer's user alone. An explorer of another user needs
    `0640`, a second trainer of another user `0660`, in one group (a job folder with the setgid bit hands the group on),
    and the right to enter the folders above. _Train._"""
    ulysses_sequence_parallel_size: Positive = 1
    """Workers that read each row together, a part of its tokens each,
    for sequences too long for one GPU. It must divide `workers`, and with the model's heads go evenly. _Train._"""
    workers: Positive | None = None
    """Processes that [share each step](training.md#several-gpus), a GPU each; and the weights, where a GPU has no room
    for all. null: one for each GPU that no engine takes, and at least one. _Train._"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer computes. `auto`: on the CPU if `gpu_per_node` is 0, else on a GPU. In mode `both` those are
    the GPUs after the engines', else the last. _Train._"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The models' number format; `auto` is bfloat16 on GPUs and float32 on the CPU. The optimiser always works in
    float32. _Train._"""
    seed: NotNegative = 42
    """The seed of everything random in the trainer. _Train._"""
    micro_batch_tokens: Positive | None = None
    """Tokens that go through the model at once, of whole sequences side by side. null: as many [as the GPU's memory
    holds](training.md#memory), up to 32768; 8192 on a CPU. Where memory runs out, it is
    [halved](operations.md#disk-and-memory); the result stays the same. _Train._"""
    activation_checkpointing: bool | None = None
    """Keep only what goes into each layer for the backward pass, and make the rest again there: [about a third more
    work, much less memory](training.md#packed-rows). null: where nothing fits without, and from the first sequence on
    that alone does not. _Train._"""
    compile: bool | None = None
    """Compile the layers and what follows the head with `torch.compile`: a step takes two thirds of the time on a GPU,
    the first one half a minute more; on a CPU the first take minutes. It needs a C compiler. null: on a GPU, where
    there is one. The numbers stay the same but for rounding. _Train._"""
    optimizer_offload: bool = False
    """Keep AdamW's masters and moments in [main memory](training.md#memory), where the CPU makes the update: 12 bytes a
    weight less of a GPU. _Train._"""
    allow_routing_mismatch: bool = False
    """Train a [mixture of experts](architectures.md#mixtures-of-experts). Training changes its routers or what they
    read, so engine and trainer may choose other experts for the same tokens. false: it is refused. _Train._"""
    yield_to_traffic: bool = False
    """Wait before each micro-batch, or of several workers before each step, until no request has been in flight for
    0.6 s: for an engine and a trainer that share a GPU. A micro-batch that has begun ends first, so smaller
    `trainer.micro_batch_tokens` yield sooner. Training stands still while there is traffic; `tuneloop doctor` says how
    far it lags. Explorer and trainer need the same, and one job folder. _Train._"""
    poll_interval: Seconds = 1.0
    """Seconds between two looks for a full batch, without a commit. _Train._"""
    max_staleness: NotNegative | None = None
    """Committed replies that were sampled more than so many versions ago are not trained on but expire; `null` trains
    on feedback however late it comes. _Train._"""
    total_steps: Positive | None = None
    """Stop after so many steps; null: go on until stopped. _Train._"""

    @property
    def tokens_at_once(self) -> int:
        """`micro_batch_tokens`, or what it is on a CPU and until the trainer has chosen."""
        return self.micro_batch_tokens or _TOKENS


class ExperienceBufferSettings(Section):
    """Where experiences are kept. `path` is a database URL; without one, an SQLite file in the job folder."""

    name: FolderName = "exp_buffer"
    """Name of the store: the file `buffer/{name}.db` in the job folder, or the schema on PostgreSQL. Explorer and
    trainer need the same."""
    path: DatabaseUrl | None = None
    """URL of the database: `postgresql://user:password@host/database` or `sqlite:////folder/file.db`; null: an SQLite
    file in the job folder. Explorer and trainer need the same; on several machines, PostgreSQL."""


class TrainerInputSettings(Section):
    """Trinity's nesting around the experience buffer."""

    experience_buffer: ExperienceBufferSettings = ExperienceBufferSettings()


class BufferSettings(Section):
    """The batch and its source."""

    train_batch_size: Positive = 32
    """Experiences of one step. _Train._"""
    commit: Literal["auto", "manual"] = "manual"
    """How rewarded replies are released to the trainer. `manual`: by `POST /commit`. `auto`: [by
    themselves](feedback.md#commit) as well, 30 s after the last feedback about them. _Serve._"""
    order: Literal["oldest", "freshest", "priority"] = "oldest"
    """Which committed experiences come first: the oldest, the newest, or those with the highest `metadata.priority` in
    their request (0 unless given; the oldest first among equals). _Train._"""
    group_by: Literal["none", "run", "task", "preference"] = "none"
    """What is trained on together or not at all. `run`: the calls of one run of a task (a trajectory). `task`: all runs
    of a task. `preference`: the two replies of a preference (dpo). A batch is then made of whole groups and has at
    least `train_batch_size` experiences. _Train._"""
    group_size: AtLeastTwo = 8
    """Runs that make a group of `task` complete, once none of its replies waits for feedback or a commit. _Train._"""
    group_timeout: Seconds = 3600.0
    """Seconds after the first commit of a group when it is trained on with what there is; a lone run of a task expires
    then. _Train._"""
    whole_groups_only: bool = False
    """Train on a group of `task` only with all `group_size` runs: those that failed or took long may be missing
    otherwise, which favours the rest. _Train._"""
    batch_timeout: Seconds | None = None
    """Seconds after the oldest commit that waits for a batch when a step is made of what there is, be it less than
    `train_batch_size`; null: a step waits until there is enough. _Train._"""
    max_backlog: Positive | None = 8
    """Whenever a version is registered, what waits beyond so many batches [expires](batches.md#what-is-too-much), the
    oldest first, imported replies too; null: everything waits, however long, as for data that is imported to be trained
    on whole. _Train._"""
    record_share: Fraction = 1.0
    """Share of the traffic that is recorded: of [runs](tasks.md), whose calls are recorded all or not at all, and of
    single replies. What says `store: true` is recorded always. Of the others no text and no token ids are kept:
    feedback on them is `not_recorded`, and no response follows them. _Serve._"""
    trainer_input: TrainerInputSettings = TrainerInputSettings()
