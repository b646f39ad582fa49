"""The ranks of a test: `python -m tests.trainer.workers.rank FOLDER SIZE TOGETHER`; so many share each row.

They are forked: imports take longest.

FOLDER/plan.json has the scenarios, in order; of each rank 0 leaves {name}.json and {name}.safetensors in FOLDER, and of
one that is to "save" the learner in FOLDER/{name}. One may go on "from" such a folder.
FOLDER/ends.json says of each rank its exit code and the second at which it ended.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from threading import Thread

import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule

from tests.trainer.factories import sample
from tuneloop.shared.errors import NotFinite, SamplesRefused
from tuneloop.shared.job_marks import TRAFFIC_S, touch_traffic
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer import parallel as joined_ranks
from tuneloop.trainer.batches.batch import Metrics, collate
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.micro_batch import MicroBatch
from tuneloop.trainer.models.model import Actor, is_checkpointing
from tuneloop.trainer.parallel import EndOrder, JoinedRanks, Ranks
from tuneloop.trainer.rendezvous import environment_of
from tuneloop.trainer.workers.rank import follow

STEPS = 2
#: So many tokens have room with their activations, where that is a scenario; some sequences are longer.
KEPT = 12
#: A rank that hangs is given up after so long in a scenario that is "slow", in which rank 0 takes longer.
STUCK_S, SLOW_S = 5.0, 8.0
#: What differs from run to run, or with what a process was told of its memory.
OF_THE_MACHINE = {"time/train_step", "time/yielded", "perf/tokens_per_second", "perf/memory_peak"}


class MeanRanks(JoinedRanks):
    """The usual mistake: gradients are averaged over ranks, as if each had as much to say."""

    def place(self, network, device, *, shard):
        super().place(network, device, shard=shard)
        for each in network.modules():
            if isinstance(each, FSDPModule):
                each.set_gradient_divide_factor(float(self.size))


class SlowTeacher:
    """It thinks about its first batch, and takes every token for certain."""

    thinks_s = SLOW_S

    def score(self, sequences, *, tokens):
        time.sleep(self.thinks_s)
        self.thinks_s = 0
        return torch.zeros_like(collate(sequences).sampled_BR)


def batch(step: int, *, rows: int):
    """Replies in pairs of runs of a task, the first better than the second, of very different lengths."""
    return [
        sample(
            100 * step + number,
            task_id=f"t{number // 2}",
            run_id=str(number),
            group_id=number // 2,
            reward=float(number % 2 == 0),
        )
        for number in range(rows)
    ]


def outcome(
    settings: Settings, ranks: Ranks, *, rows: int = 12, start: Path | None = None, steps: int = STEPS
) -> tuple[Metrics, dict[str, torch.Tensor], Learner]:
    """Some steps: the metrics of all, and the weights after the last."""
    learner, told = snapshot.load(settings, start, ranks), {}
    micro_batch = MicroBatch(settings)
    if settings.algorithm.algorithm_type == "distill":
        learner.teacher = SlowTeacher()
    if settings.trainer.yield_to_traffic:
        Thread(target=keep_busy, args=(settings.job_dir,)).start()
    for step in range(learner.steps, learner.steps + steps):
        try:
            metrics = micro_batch.step(learner, batch(step, rows=rows), version=0)
        except NotFinite as error:
            told[f"not finite in step {step}: {str(error).partition(' is ')[0]}"] = 1.0
            continue
        except SamplesRefused as error:
            told[f"refused in step {step}: {error}"] = 1.0
            continue
        told |= {f"{step} {name}": value for name, value in metrics.items() if name not in OF_THE_MACHINE}
    told["micro_batch_tokens"], told["spoilt"] = micro_batch.tokens, learner.spoilt
    told["checkpointing"] = is_checkpointing(learner.actor.network)
    models = {"actor": snapshot.weights_of(learner).tensors, "critic": snapshot.state_of(learner).critic_tensors}
    weights = {f"{name}.{key}": each.clone() for name, model in models.items() for key, each in model.items()}
    return told, weights, learner


def keep_busy(job_dir: Path) -> None:
    """Say that requests are in flight."""
    job_dir.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + SLOW_S
    while time.monotonic() < until:
        touch_traffic(job_dir)
        time.sleep(TRAFFIC_S)


def fail_once(how: str, rank: int, ranks: Ranks) -> None:
    """Let one rank's share of the first mini-batch of the second step fail."""
    if how in {"kept", "alone"}:
        return keep_room_for(KEPT, kept=how == "kept")
    if ranks.rank != rank:
        return
    honest, begun = Learner._backward, []

    def backward(learner, batch, targets, totals):
        if not begun or begun[-1] is not totals:
            begun.append(totals)  # One for each mini-batch.
        metrics = honest(learner, batch, targets, totals)
        if len(begun) == 3 and how == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        if len(begun) == 3 and how == "nan":
            parameter = next(learner.actor.network.parameters())
            parameter.grad = torch.full_like(parameter, float("nan"))
        if len(begun) == 3 and how == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(begun) == 3 and how == "hang":
            time.sleep(3 * STUCK_S)
        return metrics

    Learner._backward = backward


def keep_room_for(tokens: int, *, kept: bool) -> None:
    """Let a rank have room for no more tokens than that, or only where activations are kept; it lasts."""
    honest = Actor.score

    def score(self, batch, *more):
        if int(batch.lengths_B.sum()) > tokens and not (kept and is_checkpointing(self.network)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return honest(self, batch, *more)

    Actor.score = score


def fork(folder: Path, size: int, together: int) -> None:
    torch.set_num_threads(1)
    pids = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.environ.update(environment_of(rank, size, folder / "rendezvous"))
            main(folder, together)
            os._exit(0)
        pids[pid] = rank
    ends = {}
    while pids:
        pid, status = os.wait()
        ends[pids.pop(pid)] = (os.waitstatus_to_exitcode(status), time.monotonic())
    (folder / "ends.json").write_text(json.dumps([ends[rank] for rank in range(size)]))


def main(folder: Path, together: int) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    if any(scenario.get("slow") for scenario in plan.values()):
        joined_ranks._STUCK = timedelta(seconds=STUCK_S)
    ranks = JoinedRanks.join(torch.device("cpu"), together=together)
    honest, score = Learner._backward, Actor.score
    for name, scenario in plan.items():
        settings = Settings.model_validate(scenario["settings"])
        Learner._backward, Actor.score = honest, score
        ranks.__class__ = MeanRanks if scenario.get("mean") else JoinedRanks
        ranks.shards = not scenario.get("whole")
        if scenario.get("fail"):
            fail_once(scenario["fail"], scenario["on"], ranks)
        if ranks.rank:
            follow(settings, ranks)
            continue
        start = Path(scenario["from"]) if "from" in scenario else None
        asked = {name: scenario[name] for name in ("rows", "steps") if name in scenario}
        told, weights, learner = outcome(settings, ranks, start=start, **asked)
        snapshot.probe(learner, settings)  # by rank 0 alone, as between two steps
        if scenario.get("save"):
            (folder / name).mkdir()
            snapshot.save(learner, folder / name, base=settings.model.model_path)
        ranks.lead(EndOrder())
        (folder / f"{name}.json").write_text(json.dumps(told))
        save_file({key: each.contiguous() for key, each in weights.items()}, folder / f"{name}.safetensors")
    ranks.leave()


if __name__ == "__main__":
    fork(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
