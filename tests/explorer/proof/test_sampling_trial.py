"""An engine that samples from something else than the policy, or tells other log-probabilities, is found out."""

import pytest

from tests.doubles.engine import MODEL, EngineDouble
from tuneloop.explorer.engines import vllm
from tuneloop.explorer.engines.proof.reload_trial import require_samples_of_the_policy
from tuneloop.shared.errors import EngineError


async def tried(double: EngineDouble) -> None:
    async with vllm.open_session(url=double.url, socket=None, key=None) as session:
        await require_samples_of_the_policy(vllm.EngineControl(session, model_name=MODEL, tolerance=1e-3))


@pytest.mark.parametrize("drafts", [False, True])
async def test_an_engine_that_does_as_it_is_told_gets_through(double: EngineDouble, drafts: bool) -> None:
    double.drafts = drafts
    await tried(double)
    assert double.asked_for_one == 1
    assert [path for path, _ in double.passed] == ["/tokenize"] * drafts


async def test_one_that_tells_raw_log_probabilities_does_not(double: EngineDouble) -> None:
    double.raw_logprobs = True
    with pytest.raises(EngineError, match="start it with --logprobs-mode processed_logprobs"):
        await tried(double)


async def test_one_that_heeds_no_temperature_does_not(double: EngineDouble) -> None:
    double.drafts_at_any_temperature = True
    with pytest.raises(EngineError, match=r"0\.5 are 0\.5 nats from the policy's, 0\.002 are allowed: .* speculative"):
        await tried(double)


async def test_one_whose_answer_cannot_be_read_does_not(double: EngineDouble) -> None:
    double.drafts, double.max_model_len = True, 0
    with pytest.raises(EngineError, match="its log-probabilities cannot be read"):
        await tried(double)
