"""How versions come into service on two real engines, with real checkpoints and PostgreSQL, under load that never ends.

The tests share an explorer, and each goes on where the one before it ended: version 1 is held back by the gate, 2 is
tried and promoted, 3 is tried and rolled back.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest
import torch
import yaml
from sqlalchemy import select

from examples.sums.model import build, save, tokenizer
from tests.doubles import postgres
from tests.loop.harness.bare_engine import MODEL, attached_to, put_weights
from tests.loop.harness.oracle import Oracle
from tests.loop.harness.regulars import USERS, Regulars
from tests.loop.harness.services import GPUS, Service, commit, ledger_of, wait_for, write_settings
from tests.loop.harness.trials import Stage
from tests.trainer.factories import sample
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.experience import Sample, VersionState
from tuneloop.shared.ledger.storage.schema import exchanges, experiences
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.publication import Publication
from tuneloop.trainer.learner import Learner

pytestmark = [pytest.mark.vllm, pytest.mark.postgres, pytest.mark.contract]

SHARE = 0.4
SUMS = {f"{left}+{right}=": str(left + right) for left in range(4) for right in range(3)}
PROBED = list(range(40, 104))

#: How far apart engine and trainer may lie, and how far two versions lie apart at least: nats a token.
NEAR, FAR = (1e-2, 2e-2) if GPUS else (1e-3, 1e-2)

WORDS = tokenizer()


class Lesson(NamedTuple):
    """A question as the engine shows it to the model, and an answer with its end."""

    prompt_ids: list[int]
    reply_ids: list[int]


def lesson(question: str, answer: str) -> Lesson:
    asked = [{"role": "user", "content": question}]
    prompt = WORDS.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    return Lesson(WORDS(prompt).input_ids, [*WORDS(answer).input_ids, WORDS.eos_token_id])


def make_model_that_adds(folder: Path) -> Path:
    """A tiny model that knows the answers to SUMS by heart."""
    torch.set_num_threads(1)
    model, words = build()
    lessons = [lesson(*each) for each in SUMS.items()]
    ids = torch.tensor([each.prompt_ids + each.reply_ids for each in lessons])
    labels = ids.clone()
    labels[:, : len(lessons[0].prompt_ids)] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    save(model, words, folder)
    return folder


def practised(learner: Learner) -> Sequence[Sample]:
    """Each sum with its right answer, which is rewarded, and with a wrong one."""
    samples = []
    for question, right in SUMS.items():
        for answer in (right, str((int(right) + 1) % 10)):
            prompt, reply = lesson(question, answer)
            told = learner.logprobs(prompt + reply)[-len(reply) :]
            arrays = {
                "prompt_ids": np.array(prompt, dtype=np.int32),
                "completion_ids": np.array(reply, dtype=np.int32),
                "logprobs": np.array(told, dtype=np.float32),
            }
            samples.append(sample(len(samples), reward=float(answer == right), temperature=1.0, **arrays))
    return samples


@torch.no_grad()
def scramble(learner: Learner) -> None:
    """The same numbers in other places: a valid model that knows nothing."""
    generator = torch.Generator().manual_seed(0)
    for weight in learner.actor.network.parameters():
        order = torch.randperm(weight.numel(), generator=generator)
        weight.copy_(weight.flatten()[order].view_as(weight))


@dataclass
class OnVllm(Stage):
    """The same on two engines of vLLM's."""

    engines: list[httpx.Client] = field(default_factory=list)

    def publish(self, *, scrambled: bool = False) -> int:
        """Register what a trainer makes of the champion in a step, or that with its weights in disorder."""
        settings, store = self.service.settings, CheckpointStore(self.service.settings.job_dir)
        parent = self.ledger.versions.champion().version
        learner = snapshot.load(settings, store.path(parent) if parent else None)
        learner.step(practised(learner))
        if scrambled:
            scramble(learner)
        epoch = self.ledger.training.take_epoch("by hand")
        publication = Publication(
            settings, store, snapshot.weights_of(learner), snapshot.probe(learner, settings), epoch=epoch, parent=parent
        )
        return publication.register(self.ledger.training, []).version

    def distances(self, version: int) -> list[float]:
        """How far each engine is from a version's checkpoint, read by transformers: nats a token."""
        settings = self.service.settings
        folder = CheckpointStore(settings.job_dir).path(version) / "actor" if version else settings.model.model_path
        right = Oracle(folder).logprobs(PROBED[:1], PROBED[1:])
        body = {"model": settings.served_model_name, "prompt": PROBED, "max_tokens": 1, "prompt_logprobs": 0}
        return [_distance(engine, body, right) for engine in self.engines]

    def until_both_have(self, version: int) -> None:
        """Wait until both engines have a version's weights, and answer with them."""
        wait_for(lambda: max(self.distances(version)) < NEAR, why=f"no two engines have version {version}")
        self.until_ready()
        now = time.time()
        self.until_it_alone_answers(version)
        answering = select(exchanges.c.engine).where(exchanges.c.received_at > now).distinct()
        wait_for(lambda: {row.engine for row in self.rows(answering)} == {0, 1}, why="only one engine answers")

    def assert_only_users_are_in_the_books(self) -> None:
        """What the gate asks engines is in none of them."""

        def users() -> set[str | None]:
            return {row.user_id for row in self.rows(select(exchanges.c.user_id).distinct())}

        wait_for(lambda: users() >= {*USERS}, why="not every user has been answered")
        commit(self.service.url)  # it waits for what is not in the database yet
        assert users() == {*USERS}


def _distance(engine: httpx.Client, body: dict[str, object], right: list[float]) -> float:
    rows = engine.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"][1:]
    found = [row[str(token)]["logprob"] for token, row in zip(PROBED[1:], rows, strict=True)]
    return float(np.abs(np.array(found) - right).mean())


@pytest.fixture(scope="module")
def stage(
    tmp_path_factory: pytest.TempPathFactory, model: Path, bare_engine: httpx.Client, second_engine: httpx.Client
) -> Iterator[OnVllm]:
    engines = [bare_engine, second_engine]
    folder, server = tmp_path_factory.mktemp("rollout"), postgres.started()
    tasks = folder / "tasks.jsonl"
    asked = [{"messages": [{"role": "user", "content": each}], "answer": answer} for each, answer in SUMS.items()]
    tasks.write_text("".join(json.dumps(each) + "\n" for each in asked))
    config = write_settings(
        folder,
        make_model_that_adds(folder / "model"),
        algorithm={"algorithm_type": "reinforce", "optimizer": {"lr": 3e-4}},
        buffer={"train_batch_size": 16, "trainer_input": {"experience_buffer": {"path": server.url}}},
        gate={"mode": "block"},
        monitor={"evaluation": {"path": str(tasks), "judge": "exact"}},
        # How fast they are says nothing on a machine that is busy with other tests.
        rollout={"mode": "canary", "share": SHARE, "latency": None},
    )
    values = yaml.safe_load(config.read_text())
    values["model"]["served_model_name"] = MODEL
    values["explorer"]["rollout_model"] = attached_to(*engines)
    config.write_text(yaml.safe_dump(values))
    for engine in engines:
        put_weights(engine, folder / "model")
    service = Service(config, "explorer")
    service.wait_until_ready()
    ledger = ledger_of(service.settings)
    with Regulars(service.url, service.settings.served_model_name) as users:
        found = OnVllm(config, server, service, ledger, users, engines=engines)
        found.until_ready()
        yield found
    assert found.service.stop() == 0
    assert ledger.reports.imbalance() == []
    ledger.close()
    server.close()
    for engine in engines:
        put_weights(engine, model)


def test_what_the_gate_holds_back_is_rejected_and_answers_nobody(stage: OnVllm) -> None:
    number = stage.publish(scrambled=True)
    stage.until(number, VersionState.REJECTED)
    stage.until_both_have(0)
    rejected = next(each for each in stage.ledger.versions.events(number) if each.action == "rejected")
    assert "it did not pass the gate: its score is 0" in (rejected.reason or "")
    assert rejected.details["instead_of"] == 0
    assert (rejected.details["champion"]["score"], rejected.details["candidate"]["score"]) == (1.0, 0.0)
    assert stage.actions(number) == ["published", "evaluated", "rejected"]
    assert {each.version for each in stage.users.answers} == {0}
    assert stage.failures() == []
    stage.assert_only_users_are_in_the_books()
    assert {tuple(row) for row in stage.rows(select(experiences.c.version_min, experiences.c.version_max))} == {(0, 0)}


def test_what_is_better_answers_its_share_and_is_promoted_though_the_database_fails_meanwhile(stage: OnVllm) -> None:
    number = stage.publish()
    stage.until(number, VersionState.CANARY)
    began = stage.until_it_answers(number)
    stage.until_ready()
    assert min(stage.distances(number)) < NEAR
    assert min(stage.distances(0)) < NEAR
    stage.server.stop("immediate")
    stage.serve(2 * len(USERS))
    stage.server.start()
    stage.serve(len(USERS))
    assert stage.actions(number) == ["published", "evaluated", "canary"]
    stage.users.worth = {0: 0.1, number: 0.9}
    promoted = stage.until(number, VersionState.CHAMPION)
    assert (promoted.actor, str(promoted.action)) == ("explorer", "promoted")
    assert "it earns more" in (promoted.reason or "")
    stage.assert_it_got_its_share_and_no_more(number, began, promoted.at)
    stage.until_both_have(number)
    assert min(stage.distances(0)) > FAR
    assert stage.failures() == []
    stage.assert_only_users_are_in_the_books()


def test_what_is_worse_is_rolled_back_though_the_explorer_is_killed_meanwhile(stage: OnVllm) -> None:
    champion = stage.ledger.versions.champion().version
    assert champion > 0
    number = stage.publish()
    stage.until(number, VersionState.CANARY)
    began = stage.until_it_answers(number)
    stage.serve(2 * len(USERS))
    killed = time.time()
    stage.kill_and_start_again()
    stage.assert_it_got_its_share_and_no_more(number, began, killed)
    again = stage.until_it_answers(number)
    stage.serve(len(USERS))
    assert {each.version for each in stage.users.since(killed)} == {champion, number}
    assert stage.actions(number) == ["published", "evaluated", "canary"]
    stage.users.worth = {champion: 0.9, number: 0.1}
    ended = stage.until(number, VersionState.ROLLED_BACK)
    assert (ended.actor, str(ended.action)) == ("explorer", "rolled_back")
    assert "it earns less" in (ended.reason or "")
    stage.assert_it_got_its_share_and_no_more(number, again, ended.at)
    stage.until_both_have(champion)
    assert min(stage.distances(number)) > FAR
    assert stage.ledger.versions.champion().version == champion
    assert stage.failures() == []
    stage.assert_only_users_are_in_the_books()
