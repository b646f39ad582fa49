"""Held-out replies replayed by the trainer, with a real tiny model; and the form of what it answers."""

from threading import Event

import numpy as np
import pytest
import torch

from tests.trainer.factories import commit, sample
from tuneloop.shared.evaluation.off_policy import REPLAY, REPLAY_CHAMPION, REPLAY_SIZE, HeldOutReply
from tuneloop.shared.evaluation.scores import MALFORMED
from tuneloop.shared.evaluation.tasks import tasks_of
from tuneloop.shared.experience import HELD_OUT, Evaluator, Exchange, Experience, Feedback, VersionAction, pack_ids
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.evaluation.evaluation import HeldOut
from tuneloop.trainer.evaluation.gate import Examination
from tuneloop.trainer.evaluation.off_policy import known_to, likelihoods
from tuneloop.trainer.loop import run
from tuneloop.trainer.models.model import Actor

REPLAYS = {"gate": {"mode": "report", "replay": {"share": 0.1}}}


def reply(number, **but):
    """The reply of the made-up sample of that number, as it is read from the ledger."""
    made = sample(number)
    values = {name: getattr(made, name) for name in HeldOutReply._fields}
    return HeldOutReply(**values | but)


def by_hand(actor, said):
    """Token by token over the whole vocabulary."""
    ids = [*said.prompt_ids.tolist(), *said.completion_ids.tolist()]
    with torch.no_grad():
        logits_TV = actor.network(torch.tensor([ids])).logits[0].double() / said.temperature
    logprobs_TV = logits_TV.log_softmax(1)
    return sum(float(logprobs_TV[at - 1, ids[at]]) for at in range(len(said.prompt_ids), len(ids)))


@pytest.mark.parametrize("budget", [1, 40, 1000])
def test_likelihoods_are_those_of_whole_replies_at_their_temperature(settings, opinionated, budget):
    actor = Actor.load(settings(), opinionated)
    replies = [reply(number) for number in range(12)]
    assert {each.temperature for each in replies} == {0.7, 1.0}
    found = likelihoods(actor, replies, budget=budget)
    assert found == pytest.approx([by_hand(actor, each) for each in replies], rel=1e-4)
    assert likelihoods(actor, [], budget=budget) == []


def test_a_token_of_another_model_is_not_known(settings):
    actor = Actor.load(settings(), settings().model.model_path)
    assert known_to(actor, reply(1))
    assert not known_to(actor, reply(1, completion_ids=np.array([actor.vocabulary], np.int32)))


# In an examination.


def hold_out(ledger, actor, count, reward):
    """Replies of one token that the actor sampled, with rewards by token; nobody trains on them."""
    prompt = [5, 6, 7]
    with torch.no_grad():
        logprobs_V = actor.network(torch.tensor([prompt])).logits[0, -1].float().log_softmax(0)
    tokens = torch.multinomial(logprobs_V.exp(), count, replacement=True, generator=torch.Generator().manual_seed(3))
    for number, token in enumerate(tokens.tolist()):
        its = Experience(
            choice=0,
            prompt_ids=pack_ids(prompt),
            completion_ids=pack_ids([token]),
            logprobs=logprobs_V[token].numpy().tobytes(),
            version_min=0,
            version_max=0,
            temperature=1.0,
            finish_reason="stop",
            text="",
            drop_reason=HELD_OUT,
        )
        times = {"tenant": "t", "received_at": 5.0}
        named = {"msg_id": f"held-{number}", "task_id": "sums/1"}
        said = Exchange(**times, **named, endpoint="chat", request=b"{}", latency_s=0.1, experiences=(its,))
        heard = Feedback(**times, event_id=f"held-{number}", call_id="c", msg_id=f"held-{number}", choice=None)
        ledger.recording.record([said, Feedback(**{**_fields(heard), "value": reward(token)})])
    return tokens.tolist()


def _fields(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def figures(ledger, version):
    return {(each.metric, each.slice): each.value for each in ledger.evaluations.of(version, Evaluator.TRAINER)}


def evaluated(ledger):
    return [each for each in ledger.versions.events() if each.action is VersionAction.EVALUATED]


def prefers(learner, tokens, by):
    """Make the learner likelier to say these tokens, whatever was asked."""
    network = learner.actor.network
    head = torch.nn.Linear(network.lm_head.in_features, network.lm_head.out_features)
    head.weight, head.bias = network.lm_head.weight, torch.nn.Parameter(torch.zeros(head.out_features))
    with torch.no_grad():
        head.bias[tokens] += by
    network.lm_head = head
    learner.actor = Actor(network)


@pytest.mark.parametrize(("by", "passes"), [(0.7, True), (-0.7, False)])
def test_a_version_that_turns_away_from_what_was_praised_is_found_out(settings, ledger, by, passes):
    chosen = settings(**REPLAYS)
    ledger.versions.ensure_base(chosen.model.model_path)
    base = Actor.load(chosen, chosen.model.model_path)
    said = hold_out(ledger, base, 400, lambda token: float(token % 2))
    commit(ledger, [sample(i) for i in range(4)])
    run(settings(trainer={"total_steps": 1}), Event())
    learner = snapshot.load(chosen, None)
    odd = torch.arange(1, learner.actor.vocabulary, 2)
    prefers(learner, odd, by)
    Examination(chosen, ledger).examine(learner, 1)

    (event,) = evaluated(ledger)
    told = event.details["replay"]
    assert (event.details["passed"], told["replies"], told["concluded"]) == (passes, 400, True)
    assert told["champion"] == pytest.approx(np.mean([token % 2 for token in said]), abs=1e-4)
    with torch.no_grad():
        shares_V = learner.actor.network(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(0)
    assert told["candidate"] == pytest.approx(float(shares_V[odd].sum()), abs=0.03)
    assert told["slices"]["sums"]["candidate"] == told["candidate"]
    found = figures(ledger, 1)
    assert {metric for metric, _ in found} == {"tasks", REPLAY, REPLAY_CHAMPION, REPLAY_SIZE, "replay_of"}
    assert figures(ledger, 0).keys() == {("tasks", "")}
    if not passes:
        assert event.reason.startswith("on held-out replies it would earn 0.")


def test_the_loop_trains_on_nothing_that_is_held_out_and_replays_it_for_each_version(settings, ledger):
    base = Actor.load(settings(), settings().model.model_path)
    hold_out(ledger, base, 8, lambda token: 1.0)
    commit(ledger, [sample(i) for i in range(8)])
    run(settings(**REPLAYS, trainer={"total_steps": 2}), Event())
    assert [each.consumed for each in ledger.versions.all()] == [0, 4, 4]
    assert ledger.reports.counts()["dropped"] == 8
    first, second = evaluated(ledger)
    assert (first.version, second.version) == (1, 2)
    assert first.details["replay"]["replies"] == 8
    assert "the replay is inconclusive: 8 held-out replies" in first.reason
    assert figures(ledger, 2)["replay_of", ""] == 0.0


def test_another_champion_makes_another_replay(settings, ledger):
    base = Actor.load(settings(), settings().model.model_path)
    hold_out(ledger, base, 8, lambda token: 1.0)
    commit(ledger, [sample(i) for i in range(8)])
    run(settings(**REPLAYS, trainer={"total_steps": 2}), Event())
    ledger.versions.promote(1)
    chosen = settings(**REPLAYS)
    examination, learner = Examination(chosen, ledger), snapshot.load(chosen, ledger.versions.newest().path)
    for _ in range(2):
        examination.examine(learner, 2)
    assert [each.details["instead_of"] for each in evaluated(ledger)] == [0, 0, 1]
    assert figures(ledger, 2)["replay_of", ""] == 1.0


# The form of replies.


@pytest.mark.parametrize(("most", "form", "share"), [(4, r"(?s).*", 1.0), (200, r"(?s).*", 0.0), (200, "json", 1.0)])
def test_a_reply_that_is_cut_off_or_in_no_form_is_malformed(settings, tmp_path, most, form, share):
    path = tmp_path / "tasks.jsonl"
    form = form.replace("\\", "\\\\")
    path.write_text(f'{{"prompt": "a", "answer": "b", "format": "{form}"}}\n')
    chosen = settings(monitor={"evaluation": {"path": path, "most_tokens": most}})
    actor, held_out = Actor.load(chosen, chosen.model.model_path), HeldOut(chosen, tasks_of(chosen.monitor.evaluation))
    ids = held_out._tokenizer("a")["input_ids"]
    with torch.no_grad():
        # It ends after its seventh token.
        held_out._ends = [held_out._generate(actor, [ids])[0][6]] if most > 7 else held_out._ends
    found = {each.metric: each.value for each in held_out.figures(actor)}
    assert found[MALFORMED] == share
