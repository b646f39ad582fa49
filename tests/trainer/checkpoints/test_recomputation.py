"""What was not captured is recomputed from the weights that sampled it, and held against what was."""

from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from tests.trainer.factories import commit, points, sample
from tuneloop.shared.checkpoints import ACTOR
from tuneloop.shared.experience import Float32s, Grammar, Sample, State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.operations.diagnosis import CAPTURE_MISMATCH
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.selection import with_allowed_tokens
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.recomputation import Recomputation
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.loop import run
from tuneloop.trainer.micro_batch import MicroBatch

pytestmark = pytest.mark.contract

Made = Callable[..., Settings]

SHARE = {"capture": {"logprobs": "share", "share": 0.5}}


def silent(number: int, **but: Any) -> Sample:
    """A sample whose log-probabilities were not captured."""
    made = sample(number, **but)
    return msgspec.structs.replace(made, logprobs=np.full_like(made.logprobs, np.nan))


@torch.no_grad()
def truth(folder: Any, sampled: Sample, mask: Any = None) -> Float32s:
    """What transformers says of a reply, one token after the other."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = np.concatenate([sampled.prompt_ids, sampled.completion_ids]).astype(np.int64)
    logits = model(torch.tensor(ids)[None]).logits[0, len(sampled.prompt_ids) - 1 : -1] / sampled.temperature
    if mask is not None:
        logits = logits.masked_fill(~torch.tensor(mask), -torch.inf)
    picked = logits.log_softmax(-1).gather(-1, torch.tensor(sampled.completion_ids.astype(np.int64))[:, None])
    return picked[:, 0].numpy()  # type: ignore[no-any-return]


def recomputation(settings: Settings, ledger: Ledger) -> Recomputation:
    ledger.versions.ensure_base(settings.model.model_path.absolute())
    return Recomputation(settings, ledger, MicroBatch(settings))


def newest(settings: Settings, ledger: Ledger) -> tuple[Learner, int]:
    version = ledger.versions.newest()
    return snapshot.load(settings, version.path if version.version else None), version.version


def two_versions(settings: Made, ledger: Ledger, **but: Any) -> Settings:
    """Train two versions, of what was captured."""
    commit(ledger, [sample(i) for i in range(8)])
    chosen = settings(trainer={"total_steps": 2}, **but)
    run(chosen, Event())
    return chosen


@pytest.mark.parametrize("unpublished", [False, True])
def test_each_reply_gets_the_log_probabilities_of_the_version_that_sampled_it(
    settings: Made, ledger: Ledger, unpublished: bool
) -> None:
    chosen = two_versions(settings, ledger, explorer=SHARE)
    learner, version = newest(chosen, ledger)
    rows = [
        silent(20 + i, version_min=i % 3, version_max=i % 3, completion_ids=sample(90 + i).completion_ids)
        for i in range(9)
    ]
    rows = [
        msgspec.structs.replace(each, logprobs=np.full(len(each.completion_ids), np.nan, np.float32)) for each in rows
    ]
    filled, refused = recomputation(chosen, ledger).fill(rows, learner, version=None if unpublished else version)
    assert refused == {}
    assert all(each.recomputed for each in filled)
    folders = [chosen.model.model_path, *(ledger.versions.all()[number].path / ACTOR for number in (1, 2))]
    for each in filled:
        right = truth(folders[each.version_min], each)
        assert np.abs(each.logprobs - right).max() < 1e-5
        wrong = truth(folders[(each.version_min + 1) % 3], each)
        assert np.abs(each.logprobs - wrong).max() > 1e-4


def test_a_reply_that_a_grammar_held_is_recomputed_under_it(settings: Made, ledger: Ledger) -> None:
    chosen = settings(explorer=SHARE)
    learner, version = newest_of_base(chosen, ledger)
    held = silent(
        1, completion_ids=np.frombuffer(b"ab", np.uint8).astype(np.int32), grammar=Grammar(kind="regex", spec="[ab]{2}")
    )
    held = msgspec.structs.replace(held, logprobs=np.full(2, np.nan, np.float32), completion_ids=letters(chosen, "ab"))
    [masked], refused = with_allowed_tokens([held], chosen, vocabulary=learner.actor.vocabulary)
    assert refused == {}
    [filled], _ = recomputation(chosen, ledger).fill([masked], learner, version=version)
    allowed = np.zeros((2, learner.actor.vocabulary), bool)
    allowed[:, letters(chosen, "ab")] = True
    right = truth(chosen.model.model_path, filled, allowed)
    assert np.abs(filled.logprobs - right).max() < 1e-5
    assert np.exp(filled.logprobs).min() > 0.3, "one of two letters"


def newest_of_base(chosen: Settings, ledger: Ledger) -> tuple[Learner, int]:
    ledger.versions.ensure_base(chosen.model.model_path.absolute())
    return newest(chosen, ledger)


def letters(chosen: Settings, text: str) -> Any:
    from tuneloop.trainer.batches.tokenizer import tokenizer_of

    words = tokenizer_of(chosen)
    return np.array([words.get_vocab()[letter] for letter in text], np.int32)


def test_a_trainer_learns_the_same_from_what_it_recomputes_as_from_what_was_captured(
    settings: Made, ledger: Ledger
) -> None:
    chosen = settings(explorer=SHARE, trainer={"total_steps": 2})
    commit(ledger, [silent(i) for i in range(8)])
    run(chosen, Event())
    assert ledger.reports.counts()[State.TRAINED] == 8
    assert [value for _, value in points(chosen.tensorboard_dir / "trainer", "capture/recomputed")] == [4, 4]
    # Nothing has moved since the replies of step 1 were sampled; in step 2 the weights are others.
    first, second = (value for _, value in points(chosen.tensorboard_dir / "trainer", "mismatch_kl/mean"))
    assert first < 1e-9 < second


def test_where_a_quarter_is_captured_every_row_is_trained_on(settings: Made, ledger: Ledger) -> None:
    chosen = settings(explorer={"capture": {"logprobs": "share", "share": 0.25}}, trainer={"total_steps": 2})
    told = captured([sample(i) for i in (0, 4)], chosen.model.model_path)
    commit(ledger, [told[i // 4] if i % 4 == 0 else silent(i) for i in range(8)])
    run(chosen, Event())
    assert ledger.reports.counts()[State.TRAINED] == 8
    assert [value for _, value in points(chosen.tensorboard_dir / "trainer", "capture/recomputed")] == [3, 3]
    assert ledger.alarms.all() == []


def test_a_restart_in_the_middle_recomputes_the_same(settings: Made, ledger: Ledger) -> None:
    commit(ledger, [silent(i) for i in range(16)])
    run(settings(explorer=SHARE, trainer={"total_steps": 2}), Event())
    chosen = settings(explorer=SHARE, trainer={"total_steps": 4})
    run(chosen, Event())
    learner, _ = newest(chosen, ledger)
    assert learner.steps == 4
    assert ledger.reports.counts()[State.TRAINED] == 16


def test_a_reply_whose_version_is_gone_is_dropped_with_the_reason(settings: Made, ledger: Ledger) -> None:
    chosen = two_versions(settings, ledger, explorer=SHARE)
    rows = [silent(30, version_min=7, version_max=7), silent(31, version_min=1, version_max=2), silent(32)]
    kept, refused = recomputation(chosen, ledger).without_lost(rows, version=2)
    assert [each.id for each in kept] == [32]
    assert {reason: [each.id for each in lost] for reason, lost in refused.items()} == {
        "its log-probabilities were not captured, and the weights of version 7 that sampled it are gone": [30],
        "its log-probabilities were not captured, and more than one version sampled it": [31],
    }


def test_where_a_restore_left_numbers_out_a_version_is_found_by_its_own(
    settings: Made, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = two_versions(settings, ledger, explorer=SHARE)
    learner, version = newest(chosen, ledger)
    rows = [silent(1, version_min=1, version_max=1)]
    [expected], _ = recomputation(chosen, ledger).fill(rows, learner, version=version)
    there = ledger.versions.all()
    monkeypatch.setattr(ledger.versions, "all", lambda: there[1:])
    [found], _ = recomputation(chosen, ledger).fill(rows, learner, version=version)
    assert found.logprobs.tolist() == expected.logprobs.tolist()


def test_damaged_weights_are_not_recomputed_from(settings: Made, ledger: Ledger) -> None:
    chosen = two_versions(settings, ledger, explorer=SHARE)
    learner, version = newest(chosen, ledger)
    [weights] = (ledger.versions.all()[1].path / ACTOR).glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.chmod(0o600)
    weights.write_bytes(data)
    rows = [silent(1, version_min=1, version_max=1), silent(2, version_min=2, version_max=2)]
    filled, refused = recomputation(chosen, ledger).fill(rows, learner, version=version)
    assert [each.id for each in filled] == [2]
    assert [[each.id for each in lost] for lost in refused.values()] == [[1]]


@pytest.mark.parametrize("capture", ["all", "share"])
def test_versions_that_sampled_what_still_waits_are_kept(settings: Made, ledger: Ledger, capture: str) -> None:
    but = {"explorer": {"capture": {"logprobs": capture}}}
    commit(ledger, [silent(99, version_min=1, version_max=1)], unsaid=[99])
    for steps in (1, 2, 3, 4, 5):
        commit(ledger, [sample(10 * steps + i) for i in range(4)])
        run(settings(trainer={"total_steps": steps, "max_checkpoints_to_keep": 1}, **but), Event())
        ledger.versions.promote(steps)
    there = {each.version for each in ledger.versions.all() if each.version and each.path.exists()}
    assert there == ({1, 2, 3, 4, 5} if capture == "share" else {2, 3, 4, 5})


def captured(rows: Sequence[Sample], folder: Any, *, off: float = 0.0) -> list[Sample]:
    """As an engine tells them that has the weights of a folder, or that is `off`."""
    return [msgspec.structs.replace(each, logprobs=(truth(folder, each) - off).astype(np.float32)) for each in rows]


def test_what_was_captured_is_compared_and_a_mismatch_is_an_alarm(settings: Made, ledger: Ledger) -> None:
    chosen = settings(explorer=SHARE)
    learner, version = newest_of_base(chosen, ledger)
    base, compared = chosen.model.model_path, recomputation(chosen, ledger)
    long = [sample(i, completion_ids=np.arange(40, dtype=np.int32) + i, temperature=0.7) for i in range(24)]
    for each in captured(long, base):
        assert compared.fill([each], learner, version=version)[0] == [each], "what was captured stays as it was"
    assert compared.take_figures()["capture/mismatch"] < 1e-8
    assert ledger.alarms.all() == []
    with capture_logs() as logs:
        for each in captured(long, base, off=0.5):
            compared.fill([each], learner, version=version)
    [alarm] = ledger.alarms.all()
    assert (alarm.name, alarm.threshold) == (CAPTURE_MISMATCH, 0.01)
    assert alarm.value is not None
    assert alarm.value > 0.01
    assert [entry["alarm"] for entry in logs if entry["event"] == "alarm_raised"] == [CAPTURE_MISMATCH]


def test_nothing_is_recomputed_where_all_is_captured(settings: Made, ledger: Ledger) -> None:
    chosen = settings()
    learner, version = newest_of_base(chosen, ledger)
    untouched = recomputation(chosen, ledger)
    rows = [sample(i) for i in range(4)]
    assert untouched.fill(rows, learner, version=version) == (rows, {})
    assert untouched.take_figures() == {}


def test_methods_that_learn_from_any_reply_need_no_log_probabilities(settings: Made, ledger: Ledger) -> None:
    chosen = settings(algorithm={"algorithm_type": "sft"}, explorer=SHARE, trainer={"total_steps": 1})
    commit(ledger, [silent(i, reward=1.0, version_min=9, version_max=9) for i in range(4)])
    run(chosen, Event())
    assert ledger.reports.counts()[State.TRAINED] == 4
    assert points(chosen.tensorboard_dir / "trainer", "capture/recomputed") == [(1, 0.0)]
