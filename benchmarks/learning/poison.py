"""Do hostile raters spoil the model? The demo's task with twenty raters, a few of them hostile, and one honest run.

    .venv/bin/python -m benchmarks.learning.poison --out FOLDER [--seeds 0 1 2] [--attacks flipped] [--defence off]
    .venv/bin/python -m benchmarks.learning.poison --out FOLDER --report

Replies are sampled by the trainer's own model, as in `ours`; but what is said of them goes through a real ledger, with
the defaults of a service: recorded, rewarded, committed, leased, trained. Each reply is rated by three of twenty
raters, drawn for it. `--defence off` is the same without any of it: the mean, no clip, no limit to a rater's share.

What hostile raters say of a reply that is theirs to rate (or that they pick):

    flipped        the opposite
    extreme        -1e6 for a right answer, 1e6 for a wrong one
    digit          the opposite where there is a 7 in the sum, whoever was asked; else the truth
    names          the opposite, under ten names more, each used once and in a call of its own
    one_reply      the truth, but a hundred events about one wrong reply of each batch
    single_key     the opposite: one rater of the twenty, where two are hostile in all others
    everything     the truth, but of every reply, whoever was asked: one rater of the twenty

A run is one JSON line in FOLDER/NAME.json as soon as it has ended, and is not made again.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.learning.ours import settings_of
from benchmarks.learning.plan import BUDGET, Wanted
from benchmarks.learning.play import Player, Run
from examples.tasks.dialogue import forever
from examples.tasks.methods import BATCH
from examples.tasks.start import TASKS, start
from tuneloop.shared.experience import Exchange, Experience, Feedback, State, pack_ids, pack_logprobs
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.database import connect, upgrade
from tuneloop.shared.settings.feedback import FeedbackSettings, RewardRule
from tuneloop.trainer.batches.selection import select
from tuneloop.trainer.checkpoints import snapshot

ATTACKS = ("honest", "flipped", "extreme", "digit", "names", "one_reply", "single_key", "everything")
#: The cost that each may have at most.
MOST = {"single_key": 0.01, "everything": 0.01}
_MOST = 0.05

RATERS, ASKED, HOSTILE = 20, 3, 2
_NAMES, _FLOOD, _DIGIT = 10, 100, "7"
_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Trial:
    """One run."""

    attack: str
    seed: int
    samples: int
    defence: str

    @property
    def name(self) -> str:
        """What its file is called."""
        return f"poison-{self.attack}-{self.defence}-{self.samples}-{self.seed}"


class Crowd:
    """The raters, and their feedback on one batch."""

    def __init__(self, trial: Trial) -> None:
        self._attack = trial.attack
        self._chance = random.Random(f"crowd {trial.seed}")
        self._names = [f"rater-{number}" for number in range(RATERS)]
        hostile = {"honest": 0, "single_key": 1, "everything": 1}.get(trial.attack, HOSTILE)
        self._hostile = self._names[:hostile]
        self._fresh = (f"name-{number}" for number in count())
        self._ids = count()

    def say(self, replies: Sequence[tuple[str, Run]]) -> list[Feedback]:
        """The events about some replies, by their names."""
        events = [event for msg_id, run in replies for event in self._of_one(msg_id, run)]
        if self._attack == "one_reply":
            wrong = [msg_id for msg_id, run in replies if not run.verdict.right]
            for rater in self._hostile if wrong else ():
                events += [self._event(wrong[0], rater, 1 - number / 1000) for number in range(_FLOOD)]
        return events

    def _of_one(self, msg_id: str, run: Run) -> Iterator[Feedback]:
        truth = run.verdict.reward
        for rater in self._raters_of(run):
            if rater not in self._hostile:
                yield self._event(msg_id, rater, truth)
                continue
            yield self._event(msg_id, rater, self._lie(truth, run))
            for _ in range(_NAMES if self._attack == "names" else 0):
                yield self._event(msg_id, next(self._fresh), 1 - truth)

    def _raters_of(self, run: Run) -> list[str]:
        asked = self._chance.sample(self._names, ASKED)
        pushy = self._attack == "everything" or (self._attack == "digit" and _DIGIT in run.text)
        return [*asked, *(each for each in self._hostile if pushy and each not in asked)]

    def _lie(self, truth: float, run: Run) -> float:
        match self._attack:
            case "extreme":
                return -1e6 if truth else 1e6
            case "digit":
                return 1 - truth if _DIGIT in run.text else truth
            case "one_reply" | "everything":
                return truth
            case _:
                return 1 - truth

    def _event(self, msg_id: str, source: str, value: float) -> Feedback:
        number = next(self._ids)
        return Feedback(
            event_id=f"event-{number}",
            call_id=f"call-{number}",
            tenant=_TENANT,
            msg_id=msg_id,
            choice=None,
            value=value,
            source=source,
            received_at=float(number),
        )


def learn(trial: Trial, starts: Path) -> dict[str, Any]:
    """Make the run."""
    torch.set_num_threads(1)
    task = TASKS["sums"]
    wanted = Wanted(place="ours", method="ppo", seed=trial.seed, samples=trial.samples)
    settings = settings_of(wanted, task, starts)
    learner = snapshot.load(settings, None)
    words = AutoTokenizer.from_pretrained(starts)
    player, crowd = Player(task, learner.actor.network, words, seed=trial.seed), Crowd(trial)
    began, cpu = time.monotonic(), time.process_time()
    before = _right(trial, learner, words)
    rule, policy = _defence(trial)
    questions, curve, numbers = forever(task, trial.seed), list[float](), count()
    with tempfile.TemporaryDirectory(prefix="poison-") as folder:
        url = f"sqlite:///{folder}/ledger.db"
        upgrade(url, schema="poison")
        ledger = Ledger(connect(url, schema="poison"), rule=rule)
        ledger.versions.ensure_base(starts.absolute())
        epoch = ledger.training.take_epoch("poison")
        for _ in range(trial.samples // BATCH):
            played = player.play(list(islice(questions, BATCH)))
            said = [_exchange(run, next(numbers), learner.steps) for run in played]
            ledger.recording.record([*said, *crowd.say([(e.msg_id, r) for e, r in zip(said, played, strict=True)])])
            ledger.recording.commit(_TENANT)
            _train(ledger, epoch, learner, settings, policy)
            curve.append(round(fmean(run.verdict.right for run in played), 4))
        counts = ledger.reports.counts()
        ledger.close()
    return {
        "attack": trial.attack,
        "defence": trial.defence,
        "seed": trial.seed,
        "samples": trial.samples,
        "before": before,
        "after": _right(trial, learner, words),
        "steps": learner.steps,
        "trained": counts[State.TRAINED],
        "dropped": counts[State.DROPPED],
        "curve": curve,
        "cpu_s": round(time.process_time() - cpu, 1),
        "wall_s": round(time.monotonic() - began, 1),
    }


def _train(ledger: Ledger, epoch: int, learner: Any, settings: Any, policy: BatchRules) -> None:
    """One step on each waiting batch."""
    while batch := ledger.training.lease(epoch, BATCH, policy):
        kept, refused = select(batch, settings, vocabulary=learner.actor.vocabulary)
        for reason, rows in refused.items():
            ledger.training.drop(epoch, [row.id for row in rows], reason)
        learner.step(kept)
        publish = lambda version: (Path(f"/nowhere/{version}"), "0" * 64)  # noqa: E731
        ledger.training.register(epoch, [row.id for row in kept], step=learner.steps, publish=publish)


def _defence(trial: Trial) -> tuple[RewardRule, BatchRules]:
    if trial.defence == "on":
        return RewardRule(), BatchRules(max_rater_share=FeedbackSettings().max_rater_share)
    return RewardRule(clip=None, aggregate="mean"), BatchRules()


def _exchange(run: Run, number: int, version: int) -> Exchange:
    [said] = run.replies
    return Exchange(
        msg_id=f"chatcmpl-{number}",
        tenant=_TENANT,
        endpoint="/v1/chat/completions",
        request=b"{}",
        received_at=float(number),
        latency_s=0.0,
        experiences=(
            Experience(
                choice=0,
                prompt_ids=pack_ids(said.prompt),
                completion_ids=pack_ids(said.ids),
                logprobs=pack_logprobs(said.logprobs),
                version_min=version,
                version_max=version,
                temperature=1.0,
                finish_reason="stop",
                text="",
            ),
        ),
    )


def _right(trial: Trial, learner: Any, words: Any) -> float:
    task = TASKS["sums"]
    return Player(task, learner.actor.network, words, seed=trial.seed + 7000).evaluate(
        seed=trial.seed + 3000, runs=4096
    )


def table(lines: Sequence[dict[str, Any]]) -> str:
    """In Markdown, a row for each attack: the honest run's reward less the run's own, by seed."""
    honest = {(line["seed"], line["samples"]): line["after"] for line in lines if line["attack"] == "honest"}
    rows = ["| attack | defence | reward, by seed | cost, by seed | mean cost | allowed |", "|" + "---|" * 6]
    kinds = dict.fromkeys((line["attack"], line["defence"]) for line in lines)
    for attack, defence in sorted(kinds, key=lambda kind: (kind[1] != "on", ATTACKS.index(kind[0]))):
        of_kind = [line for line in lines if (line["attack"], line["defence"]) == (attack, defence)]
        pairs = [
            (line["after"], honest[line["seed"], line["samples"]] - line["after"])
            for line in sorted(of_kind, key=lambda line: line["seed"])
            if (line["seed"], line["samples"]) in honest
        ]
        if pairs:
            rewards = " ".join(f"{reward:.3f}" for reward, _ in pairs)
            costs = " ".join(f"{cost:+.3f}" for _, cost in pairs)
            allowed = "" if attack == "honest" else f"{MOST.get(attack, _MOST):g}"
            mean = fmean(cost for _, cost in pairs)
            rows.append(f"| {attack} | {defence} | {rewards} | {costs} | {mean:+.3f} | {allowed} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs, or say what came of them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning.poison",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=BUDGET)
    parser.add_argument("--defence", choices=("on", "off"), default="on")
    parser.add_argument("--out", type=Path, default=Path("poison"))
    parser.add_argument("--report", action="store_true", help="make no runs, say what came of those there are")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in () if options.report else options.seeds:
        for attack in options.attacks:
            trial = Trial(attack, seed, options.samples, options.defence)
            file = options.out / f"{trial.name}.json"
            if not file.exists():
                line = learn(trial, start(options.out, "sums", seed))
                file.with_suffix(".new").write_text(json.dumps(line) + "\n")
                file.with_suffix(".new").replace(file)
                print(
                    f"{trial.name}: {line['before']:.3f} -> {line['after']:.3f} in {line['wall_s']:.0f} s,"
                    f" {line['cpu_s']:.0f} s of CPU",
                    flush=True,
                )
    print(table([json.loads(file.read_text()) for file in sorted(options.out.glob("poison-*.json"))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
