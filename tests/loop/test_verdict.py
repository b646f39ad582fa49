"""A judge who acquits everybody proves nothing: each fault that is planted must be found."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.loop.harness.crowd import Book, Judgement
from tests.loop.harness.lineage import Lineage
from tests.loop.harness.verdict import Verdict, judge
from tuneloop.shared.checkpoints import Manifest, Probe

BATCH = 2


def row(msg_id: str, reward: float | None = None, state: str = "recorded", version: int | None = None) -> Any:
    return SimpleNamespace(msg_id=msg_id, choice=0, reward=reward, state=state, trained_version=version)


def checkpoint(folder: Path, version: int, *, step: int, updates: int, counted: int | None = None) -> Path:
    path = folder / f"global_step_{version}"
    (path / "trainer_state").mkdir(parents=True)
    probe = Probe(prompt_ids=(), logprobs=(), tolerance=0.0)
    said = {"version": version, "parent": version - 1, "step": step, "epoch": 1, "created_at": 0.0}
    manifest = Manifest(**said, base_model="m", dtype="float32", probe=probe)
    (path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    state = {"steps": updates if counted is None else counted, "actor_updates": updates, "critic_updates": updates}
    (path / "trainer_state" / "state.json").write_text(json.dumps(state))
    return path


def version(number: int, *, step: int, consumed: int, path: Path = Path("base"), state: str = "retired") -> Any:
    return SimpleNamespace(version=number, policy=0, state=state, step=step, consumed=consumed, path=str(path))


def found_in(folder: Path) -> SimpleNamespace:
    """Two replies trained in version 1, one corrected late, one corrected in time, one without feedback."""
    path = checkpoint(folder, 1, step=1, updates=1)
    rows = [
        row("a", 0.1, "trained", 1),
        row("b", 0.2, "trained", 1),
        row("c", 0.3, "committed"),
        row("d", 0.5, "committed"),
        row("e"),
    ]
    return SimpleNamespace(
        rows=rows,
        events=Counter({"a": 2, "b": 1, "c": 2, "d": 2}),
        versions=[version(0, step=0, consumed=0), version(1, step=1, consumed=2, path=path)],
        trained=Counter(each.trained_version for each in rows),
    )


def book() -> Book:
    return Book(
        ["a", "b", "c", "d", "e"],
        {
            "a": Judgement([0.1, 0.1], [0.1, 0.1], 0.1),
            "b": Judgement([0.2], [0.2], 0.2),
            "c": Judgement([0.3, 0.6], [0.3, 0.6], 0.3),
            "d": Judgement([0.4, 0.5], [0.4, 0.5], 0.5),
        },
    )


def judged(said: Book, found: Any) -> Verdict:
    lineage = Lineage(BATCH)
    lineage.look(found.versions)
    return judge(said, found, lineage=lineage, imbalance=(), quarantined=0, gave_up=())


def faults(verdict: Verdict) -> set[str]:
    return {name for name in Verdict.__dataclass_fields__ if getattr(verdict, name)}


def test_a_run_without_faults_is_spotless(tmp_path: Path) -> None:
    verdict = judged(book(), found_in(tmp_path))
    assert verdict.spotless, verdict


def lose_a_reply(found: Any) -> None:
    del found.rows[4]


def store_a_reply_twice(found: Any) -> None:
    found.rows.append(row("e"))


def lose_a_correction(found: Any) -> None:
    found.events["d"] = 1


def store_feedback_twice(found: Any) -> None:
    found.events["b"] = 2


def let_the_first_reward_win(found: Any) -> None:
    found.rows[3].reward = 0.4


def let_nobodys_reward_win(found: Any) -> None:
    found.rows[2].reward = 0.7


def forget_a_commit(found: Any) -> None:
    found.rows[3].state = "rewarded"


def train_without_feedback(found: Any) -> None:
    found.rows[4].trained_version, found.trained[1] = 1, 3
    found.versions[1].consumed = 3


def train_in_no_version(found: Any) -> None:
    found.trained[7] = 1


def consume_what_is_not_trained(found: Any) -> None:
    found.trained[1] = 1


def step_twice_on_a_batch(found: Any) -> None:
    found.versions[1].step = 2


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (lose_a_reply, {"exchanges_lost"}),
        (store_a_reply_twice, {"exchanges_twice"}),
        (lose_a_correction, {"feedbacks_lost"}),
        (store_feedback_twice, {"feedbacks_twice"}),
        (let_the_first_reward_win, {"rewards_wrong"}),
        (let_nobodys_reward_win, {"rewards_wrong"}),
        (forget_a_commit, {"commits_lost"}),
        (train_without_feedback, {"trained_unasked", "lineage_mistakes"}),
        (train_in_no_version, {"lineage_mistakes"}),
        (consume_what_is_not_trained, {"lineage_mistakes"}),
        (step_twice_on_a_batch, {"lineage_mistakes"}),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, plant: Any, fault: set[str]) -> None:
    found = found_in(tmp_path)
    plant(found)
    assert faults(judged(book(), found)) == fault


def test_an_optimiser_that_did_more_than_the_ledger_knows_is_found(tmp_path: Path) -> None:
    found = found_in(tmp_path / "right")
    found.versions[1].path = str(checkpoint(tmp_path / "wrong", 1, step=1, updates=2))
    assert faults(judged(book(), found)) == {"lineage_mistakes"}


@pytest.mark.parametrize(("updates", "fault"), [(2, set()), (1, set()), (0, {"lineage_mistakes"})])
def test_an_optimiser_may_begin_anew_after_a_version_whose_state_was_not_written(
    tmp_path: Path, updates: int, fault: set[str]
) -> None:
    found = found_in(tmp_path)
    second = checkpoint(tmp_path, 2, step=2, updates=updates, counted=2)
    found.versions.append(version(2, step=2, consumed=2, path=second))
    for each in found.rows[2:4]:
        each.state, each.trained_version = "trained", 2
    found.trained = Counter(each.trained_version for each in found.rows)
    assert faults(judged(book(), found)) == fault


def test_a_version_whose_checkpoint_nobody_saw_is_a_fault(tmp_path: Path) -> None:
    found = found_in(tmp_path / "right")
    found.versions[1].path = str(tmp_path / "gone" / "global_step_1")
    assert faults(judged(book(), found)) == {"lineage_mistakes"}
