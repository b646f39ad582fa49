"""How many trained rewards do hostile raters turn to the wrong side? Twelve attacks on the real ledger.

    .venv/bin/python -m benchmarks.rater_attacks [--replies 640] [--seeds 0 1 2] [--clip 0 1] [--without]

Twenty raters, two of them hostile unless the row says otherwise, rate replies that are right or wrong. The ledger has
a service's defaults: recorded, rewarded, committed, leased in batches, trained. A trained reward is on the wrong side
when it is nearer to what a wrong reply earns than to what a right one earns; a tie counts half. Beside it stand the
share that the honest raters alone get wrong by the same draw, and the share of the replies that were trained on.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tuneloop.shared.experience import Exchange, Experience, Feedback, Sample, pack_ids, pack_logprobs
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.database import connect, upgrade
from tuneloop.shared.settings.feedback import FeedbackSettings, RewardRule

RATERS, BATCH, TENANT = 20, 64, "default"


class Attack(NamedTuple):
    """One row of the table: `words` honest raters are drawn for each reply and err with the chance `error`.

    `pushy`: the hostile ones rate every reply, not only those for which they are drawn. `lie` names what they say.
    """

    title: str
    words: int
    error: float = 0.0
    hostile: int = 2
    pushy: bool = False
    lie: str = "opposite"


ATTACKS = (
    Attack("opposite, drawn like others, 3 words a reply", 3),
    Attack("opposite, drawn like others, 1 word a reply", 1),
    Attack("rate everything; 3 honest beside, who err in 10 %", 3, 0.1, pushy=True),
    Attack("rate everything; 3 honest beside, who err in 30 %", 3, 0.3, pushy=True),
    Attack("the same, 3 hostile, honest err in 10 %", 3, 0.1, 3, pushy=True),
    Attack("the same, 3 hostile, honest err in 20 %", 3, 0.2, 3, pushy=True),
    Attack("rate everything; 2 honest beside", 2, pushy=True),
    Attack("rate everything; 1 honest beside", 1, pushy=True),
    Attack("±1e6; 2 honest beside", 2, pushy=True, lie="extreme"),
    Attack("right at first, then the opposite; 3 honest beside", 3, pushy=True, lie="late"),
    Attack("lie where a mark stands; 3 honest beside", 3, pushy=True, lie="mark"),
    Attack("ten invented names a reply under one key; 3 honest beside", 3, pushy=True, hostile=1, lie="names"),
)


class Outcome(NamedTuple):
    """Shares from 0 to 1: trained rewards on the wrong side, honest raters' own errors, replies trained on."""

    wrong: float
    honest_wrong: float
    trained: float


def run(attack: Attack, seed: int, replies: int, url: str, rule: RewardRule, policy: BatchRules) -> Outcome:
    """Make one attack on an empty ledger."""
    chance, numbers = random.Random(f"{attack.title} {seed}"), count()
    ledger = Ledger(connect(url, schema="attacks"), rule=rule)
    ledger.versions.ensure_base(Path("/nowhere").absolute())
    epoch = ledger.training.take_epoch("attacks")
    truth: dict[str, bool] = {}
    alone: list[float] = []
    trained: list[float] = []
    for start in range(0, replies, BATCH):
        names = [f"chatcmpl-{number}" for number in range(start, min(start + BATCH, replies))]
        events = []
        for name in names:
            truth[name] = chance.random() < 0.5
            said = [*_honest(attack, chance, truth[name])]
            votes = [value == truth[name] for _, value in said]
            alone.append(_wrong_share(fmean(votes)) if votes else 0.5)
            said += _hostile(attack, chance, truth[name], number=int(name.rpartition("-")[2]), of=replies)
            events += [_event(name, source, float(value), next(numbers)) for source, value in said]
        ledger.recording.record([*(_exchange(name) for name in names), *events])
        ledger.recording.commit(TENANT)
        trained += _train(ledger, epoch, policy, truth)
    ledger.close()
    return Outcome(fmean(trained) if trained else 1.0, fmean(alone), len(trained) / replies)


def _honest(attack: Attack, chance: random.Random, truth: bool) -> Iterator[tuple[str, float]]:
    drawn_from = range(attack.hostile if attack.pushy else 0, RATERS)
    for number in chance.sample(drawn_from, attack.words):
        if number < attack.hostile:
            yield f"rater-{number}", float(not truth)
        else:
            yield f"rater-{number}", float(truth != (chance.random() < attack.error))


def _hostile(
    attack: Attack, chance: random.Random, truth: bool, *, number: int, of: int
) -> Iterator[tuple[str, float]]:
    for rater in range(attack.hostile if attack.pushy else 0):
        name, opposite = f"rater-{rater}", float(not truth)
        match attack.lie:
            case "extreme":
                yield name, -1e6 if truth else 1e6
            case "late":
                yield name, opposite if number > of / 2 else float(truth)
            case "mark":
                yield name, opposite if chance.random() < 0.3 else float(truth)
            case "names":
                yield from ((f"key:app/{number}-{each}", opposite) for each in range(10))
            case _:
                yield name, opposite


def _wrong_share(right: float) -> float:
    return 0.5 if right == 0.5 else float(right < 0.5)


def _train(ledger: Ledger, epoch: int, policy: BatchRules, truth: dict[str, bool]) -> list[float]:
    """For each row of the waiting batches, whether its reward is on the wrong side."""
    found = []
    while batch := ledger.training.lease(epoch, BATCH, policy):
        found += [_side(row, truth[row.msg_id]) for row in batch]
        publish = lambda version: (Path(f"/nowhere/{version}"), "0" * 64)  # noqa: E731
        ledger.training.register(epoch, [row.id for row in batch], step=epoch, publish=publish)
    return found


def _side(row: Sample, truth: bool) -> float:
    return _wrong_share(row.reward if truth else 1 - row.reward)


def _event(msg_id: str, source: str, value: float, number: int) -> Feedback:
    call = f"call-{number}"
    return Feedback(
        event_id=f"event-{number}",
        call_id=call,
        tenant=TENANT,
        msg_id=msg_id,
        choice=None,
        value=value,
        source=source,
        received_at=float(number),
    )


def _exchange(msg_id: str) -> Exchange:
    sampled: dict[str, Any] = {"version_min": 0, "version_max": 0, "temperature": 1.0, "finish_reason": "stop"}
    choice = Experience(
        choice=0,
        prompt_ids=pack_ids([1]),
        completion_ids=pack_ids([2]),
        logprobs=pack_logprobs([-1.0]),
        text="",
        **sampled,
    )
    return Exchange(
        msg_id=msg_id,
        tenant=TENANT,
        endpoint="/v1/chat/completions",
        request=b"{}",
        received_at=0.0,
        latency_s=0.0,
        experiences=(choice,),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rater_attacks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replies", type=int, default=640)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--clip", type=float, nargs=2, default=None, metavar=("LOW", "HIGH"))
    parser.add_argument("--without", action="store_true", help="the mean, no clip, no limit to a rater's share")
    options = parser.parse_args(arguments)
    share = FeedbackSettings().max_rater_share
    rule, policy = RewardRule(clip=(0.0, 1.0)), BatchRules(max_rater_share=share)
    if options.clip:
        rule = RewardRule(clip=tuple(options.clip))
    if options.without:
        rule, policy = RewardRule(clip=None, aggregate="mean"), BatchRules()
    print("| attack | wrong side, % | honest alone, % | points more | trained, % |\n|---|---|---|---|---|", flush=True)
    for attack in ATTACKS:
        outcomes = []
        for seed in options.seeds:
            with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
                url = f"sqlite:///{folder}/ledger.db"
                upgrade(url, schema="attacks")
                outcomes.append(run(attack, seed, options.replies, url, rule, policy))
        wrong, alone, trained = (100 * fmean(each) for each in zip(*outcomes, strict=True))
        print(f"| {attack.title} | {wrong:.1f} | {alone:.1f} | {wrong - alone:+.1f} | {trained:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
