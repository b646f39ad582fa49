"""Defines the benchmark's runs: their kinds and names, and the full set."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from examples.tasks.drive import HeldTools
from examples.tasks.methods import LEARNING_RATES_OF_TRL, METHODS, REINFORCEMENT

#: `ours`: our trainer in one process; `loop`: both services with vLLM; `trl`: TRL's trainer of the method's name.
Place = Literal["ours", "loop", "trl"]

SEEDS = (0, 1, 2)
BUDGET = 4096
#: Runs through the loop of the tasks that have tools.
TOOLS, CALCULATOR = 2048, 1536
TRL_ONLINE, TRL_OFFLINE = ("grpo", "rloo"), ("dpo", "kto", "sft")
ROBUST = ("ppo", "reinforce", "raft", "kto")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One run. `samples` counts replies, runs of a task in the loop.

    `flip`: the share of rewards that say the opposite; `offset`: added to each; `coin`: rewards are tossed; `late`:
    steps between sampling and learning; `captured`: the share of replies whose log-probabilities are captured, those of
    the others are recomputed (of no `late` ones); `lora`: the rank of adapters, 0 trains all weights; `offline`: learn
    from replies of the start weights alone; `raw`: the advantage of `reinforce` is the reward, compared with nothing,
    which no setting can do; `file`: lines of a file of right answers that are learnt by `sft`, three times over, before
    the first reply; `gpu`: the loop's vLLM is on a GPU; `tools`: how the loop's engine holds calls to a
    grammar; `changes`: settings of `algorithm` over the method's own, as NAME=VALUE.
    """

    place: Place
    method: str
    task: str = "sums"
    seed: int = 0
    samples: int = BUDGET
    flip: float = 0.0
    offset: float = 0.0
    coin: bool = False
    late: int = 0
    captured: float = 1.0
    lora: int = 0
    offline: bool = False
    raw: bool = False
    file: int = 0
    gpu: bool = False
    tools: HeldTools = "plain"
    changes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The common part of seeds."""
        marks = {"flip": self.flip, "offset": self.offset, "late": self.late, "lora": self.lora, "file": self.file}
        said = [f"{mark}{value:g}" for mark, value in marks.items() if value]
        said += [f"captured{self.captured:g}"] if self.captured < 1 else []
        said += [mark for mark in ("coin", "offline", "raw", "gpu") if getattr(self, mark)]
        said += [self.tools] if self.tools != "plain" else []
        return "-".join([self.place, self.task, self.method, *said, *self.changes, str(self.samples)])

    @property
    def name(self) -> str:
        """The name of the run's file."""
        return f"{self.kind}-{self.seed}"


def everything() -> Iterator[Wanted]:
    """All runs, the quick ones first."""
    for seed in SEEDS:
        yield from _in_process(seed)
    for seed in SEEDS:
        yield from _beside_trl(seed)
    for seed in SEEDS:
        yield from _through_the_loop(seed)


def _in_process(seed: int) -> Iterator[Wanted]:
    for method in METHODS:
        yield Wanted(place="ours", method=method, seed=seed)
    for method in ROBUST:
        yield Wanted(place="ours", method=method, seed=seed, flip=0.2)
        yield Wanted(place="ours", method=method, seed=seed, offset=1.0)
        yield Wanted(place="ours", method=method, seed=seed, late=8)
    for flip, offset in ((0.0, 0.0), (0.2, 0.0), (0.0, 1.0)):
        yield Wanted(place="ours", method="reinforce", seed=seed, raw=True, flip=flip, offset=offset)
    for method in REINFORCEMENT:
        yield Wanted(place="ours", method=method, seed=seed, coin=True)
        yield Wanted(place="ours", method=method, seed=seed, task="tools")
    for method in ("ppo", "reinforce", "grpo", "multi_step_grpo"):
        yield Wanted(place="ours", method=method, seed=seed, task="calculator", samples=3 * BUDGET)


def _beside_trl(seed: int) -> Iterator[Wanted]:
    for method in TRL_ONLINE:
        for rate in LEARNING_RATES_OF_TRL:
            yield Wanted(place="trl", method=method, seed=seed, changes=(f"lr={rate}",))
    for method in TRL_OFFLINE:
        yield Wanted(place="ours", method=method, seed=seed, offline=True)
        for rate in LEARNING_RATES_OF_TRL:
            yield Wanted(place="trl", method=method, seed=seed, changes=(f"lr={rate}",))


def _through_the_loop(seed: int) -> Iterator[Wanted]:
    for method in METHODS:
        yield Wanted(place="loop", method=method, seed=seed)
    for method in ("ppo", "reinforce"):
        yield Wanted(place="loop", method=method, seed=seed, flip=0.2)
        yield Wanted(place="loop", method=method, seed=seed, offset=1.0)
        yield Wanted(place="loop", method=method, seed=seed, coin=True)
    for method in ("ppo", "reinforce", "grpo"):
        yield Wanted(place="loop", method=method, seed=seed, task="tools", samples=TOOLS)
    for method in ("reinforce", "multi_step_grpo"):
        yield Wanted(place="loop", method=method, seed=seed, task="calculator", samples=CALCULATOR)
