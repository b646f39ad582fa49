"""On real vLLM: an engine that has other weights than it should have does not get through one probe.

What one of several API servers is told holds for all, and a proof through any of them is one of the engine.

Nor does an engine get through that samples at another temperature than it is asked to.
"""

import asyncio
import json
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.loop.harness.bare_engine import KEY, MODEL, engine_on, put_weights, session_of, url_of
from tests.loop.harness.oracle import Oracle
from tests.loop.harness.services import free_port, make_model
from tuneloop.explorer.engines.proof.fingerprint import ProbeFindings
from tuneloop.explorer.engines.proof.reload_trial import require_samples_of_the_policy
from tuneloop.explorer.engines.vllm import CAPTURE_TEXT, EngineControl
from tuneloop.explorer.versions.safetensors import fingerprints_of, tensors
from tuneloop.shared.checkpoints import PROBE_LENGTH, Probe, VerifiedProbe
from tuneloop.shared.errors import EngineError

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("as_it_was"), pytest.mark.contract]

ROW = [(37 * i * i + 11 * i) % 250 for i in range(PROBE_LENGTH)]

Told = Callable[[Callable[[EngineControl], Awaitable[Any]]], Any]


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights that the engine should have, other than those it was started with."""
    return make_model(tmp_path_factory.mktemp("new"), seed=7)


@pytest.fixture(scope="module")
def probe(new: Path) -> Probe:
    return Oracle(new).probe(ROW)


@pytest.fixture(scope="module")
def half_old(tmp_path_factory: pytest.TempPathFactory, model: Path, new: Path) -> Path:
    """Every other tensor is that of the old weights."""
    folder = make_model(tmp_path_factory.mktemp("half"), seed=7)
    old, mixed = load_file(model / "model.safetensors"), load_file(new / "model.safetensors")
    mixed |= {name: old[name] for name in sorted(mixed)[::2]}
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def told(bare_engine: httpx.Client) -> Told:
    """Has an engine's Control do something."""

    def tell(what: Callable[[EngineControl], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            async with session_of(bare_engine) as session:
                return await what(EngineControl(session, model_name=MODEL, tolerance=1e-3))

        return asyncio.run(whole())

    return tell


async def _loaded(control: EngineControl, folder: Path | None, *, forgets: bool = True) -> None:
    """A reload; None: all of it but the loading."""
    await control.pause("keep")
    if folder is not None:
        await control.load(folder)
    if forgets:
        await control.reset_prefix_cache()
    await control.resume()


@pytest.fixture
def findings(told: Told, model: Path, probe: Probe) -> Callable[..., ProbeFindings]:
    """What the probe of the new weights finds after a reload from the old ones that went in some way."""

    def found(folder: Path | None, *, forgets: bool = True) -> ProbeFindings:
        async def whole(control: EngineControl) -> ProbeFindings:
            await _loaded(control, model)
            await control.cache_probe(probe)
            await _loaded(control, folder, forgets=forgets)
            return await control.measure_probe(probe)

        findings: ProbeFindings = told(whole)
        return findings

    return found


def test_a_right_engine_gets_through(findings: Callable[..., ProbeFindings], new: Path) -> None:
    found = findings(new)
    assert found.problem is None
    assert found.weights < 1e-4
    assert found.cache < 1e-4


@pytest.mark.parametrize("cause", ["skipped", "old_path", "half_old"])
def test_wrong_weights_are_found_out(
    findings: Callable[..., ProbeFindings], model: Path, half_old: Path, cause: str
) -> None:
    """`model` is the base too: the old path read again and the base model answering are the same here."""
    found = findings({"skipped": None, "old_path": model, "half_old": half_old}[cause])
    assert found.problem is not None
    assert "from the trainer's" in found.problem
    assert found.weights > 10 * found.allowed


def test_a_prefix_cache_that_outlived_its_weights_is_found_out_again_and_again(
    findings: Callable[..., ProbeFindings], told: Told, new: Path, probe: Probe
) -> None:
    for found in (findings(new, forgets=False), told(lambda control: control.measure_probe(probe))):
        assert found.weights < 1e-4
        assert found.cache > 10 * found.allowed
        assert "with and without its prefix cache" in str(found.problem)


def test_what_an_engine_says_of_a_text_tells_its_weights(told: Told, model: Path, new: Path) -> None:
    async def whole(control: EngineControl) -> list[str | None]:
        await _loaded(control, model)
        base = await control.create_probe()
        assert len(base.prompt_ids) == PROBE_LENGTH
        right = await control.measure_probe(base)
        await _loaded(control, new)
        return [right.problem, (await control.measure_probe(base)).problem]

    right, wrong = told(whole)
    assert right is None
    assert wrong is not None


def _one_unit_more(weights: dict[str, torch.Tensor]) -> None:
    """One element becomes the next number of bfloat16."""
    name = "model.layers.1.mlp.down_proj.weight"
    exact = weights[name].to(torch.bfloat16)
    exact.view(torch.int16)[3, 5] += 1
    weights[name][3, 5] = exact[3, 5].to(weights[name].dtype)


def _swap_layers(weights: dict[str, torch.Tensor]) -> None:
    for name in [each for each in weights if ".layers.0." in each]:
        other = name.replace(".layers.0.", ".layers.1.")
        weights[name], weights[other] = weights[other], weights[name]


@pytest.mark.parametrize(
    ("change", "parts"),
    [(None, []), (_one_unit_more, ["1"]), (_swap_layers, ["0", "1"])],
    ids=["right", "unit", "swap"],
)
def test_the_fingerprint_finds_what_differs_in_any_bit(
    told: Told,
    new: Path,
    probe: Probe,
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None] | None,
    parts: list[str],
) -> None:
    held = make_model(tmp_path / "held", seed=7)
    if change is not None:
        weights = load_file(held / "model.safetensors")
        change(weights)
        save_file(weights, held / "model.safetensors", metadata={"format": "pt"})
    fields = {name: getattr(probe, name) for name in Probe.__struct_fields__}
    fingerprints = {served: dict(sums) for served, sums in fingerprints_of(tensors(new), tied=False).items()}

    async def whole(control: EngineControl) -> ProbeFindings:
        await _loaded(control, held)
        return await control.measure_probe(VerifiedProbe(**fields, fingerprints=fingerprints))

    found: ProbeFindings = told(whole)
    assert found.parts == parts
    if change is _one_unit_more:
        assert found.weights < found.allowed, "log-probabilities do not show it"


_ASKED: dict[str, Any] = {"model": MODEL, "prompt": ROW[:40], "max_tokens": 8, "temperature": 1.0}


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[httpx.Client]:
    with engine_on(
        free_port(), tmp_path_factory.mktemp("servers"), model, single_process=False, api_servers=2
    ) as client:
        yield client


@asynccontextmanager
async def each_server(engine: httpx.Client) -> AsyncIterator[list[list[httpx.AsyncClient]]]:
    """Two connections to each of the two API servers, which say different ids of the engine."""
    found: defaultdict[str, list[httpx.AsyncClient]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        for _ in range(60):
            session = httpx.AsyncClient(
                base_url=url_of(engine),
                headers={"authorization": f"Bearer {KEY}"},
                limits=httpx.Limits(max_connections=1, keepalive_expiry=60),
                timeout=120,
            )
            await stack.enter_async_context(session)
            told = (await session.get("/server_info", params={"config_format": "json"})).json()["vllm_config"]
            found[told["instance_id"]].append(session)
            if len(found) == 2 and min(map(len, found.values())) >= 2:
                yield list(found.values())
                return
    raise AssertionError(f"60 connections came to the servers {list(found)}")


def control(session: httpx.AsyncClient) -> EngineControl:
    return EngineControl(session, model_name=MODEL, tolerance=1e-3)


async def answered(session: httpx.AsyncClient) -> float:
    """When a request was answered."""
    (await session.post("/v1/completions", json=_ASKED)).raise_for_status()
    return time.monotonic()


@pytest.mark.soak
def test_a_reload_through_any_api_server_holds_for_all(
    two_servers: httpx.Client, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    new = make_model(tmp_path_factory.mktemp("new"), seed=7)

    async def whole() -> None:
        async with each_server(two_servers) as ((one, asks_one, *_), (other, asks_other, *_)):
            by_one, by_other = control(one), control(other)
            assert await by_one.instance_id() == await by_other.instance_id()
            for folder, first, second in ((new, by_one, by_other), (model, by_other, by_one)):
                wanted = VerifiedProbe.of(Oracle(folder).probe(ROW), fingerprints_of(tensors(folder), tied=False))
                await second.cache_probe(wanted)
                await first.pause("keep")
                asked = [asyncio.create_task(answered(each)) for each in (asks_one, asks_other)]
                await second.load(folder)
                await first.reset_prefix_cache()
                assert not any(task.done() for task in asked)
                resumed = time.monotonic()
                await second.resume()
                assert min(await asyncio.gather(*asked)) > resumed
                for each in (first, second):
                    await proves(each, wanted)

    asyncio.run(whole())


async def proves(engine: EngineControl, wanted: VerifiedProbe) -> None:
    findings = await engine.measure_probe(wanted)
    assert findings.problem is None
    assert findings.parts == []
    assert findings.weights < 1e-4
    assert findings.cache < 1e-4


def furthest(engine: httpx.Client, oracle: Oracle, temperature: float) -> float:
    """How far a log-probability that it tells of a reply is from transformers' at most, in nats."""
    prompt = [70, 71, 72, 73] * 8
    asked = {"model": MODEL, "prompt": prompt, "temperature": temperature, "max_tokens": 60, "ignore_eos": True}
    reply = engine.post("/v1/completions", json=asked | CAPTURE_TEXT)
    if reply.status_code == 400 and "JSON" in reply.text:  # some are not even numbers
        return math.inf
    [choice] = reply.raise_for_status().json()["choices"]
    expected = oracle.logprobs(prompt, choice["token_ids"], temperature)
    return max(abs(one - other) for one, other in zip(choice["logprobs"]["token_logprobs"], expected, strict=True))


def test_an_engine_without_drafts_samples_from_the_policy(bare_engine: httpx.Client, model: Path, told: Told) -> None:
    put_weights(bare_engine, model)
    told(require_samples_of_the_policy)
    assert furthest(bare_engine, Oracle(model), 0.5) < 1e-4


def test_an_engine_on_a_cpu_that_drafts_does_not(tmp_path: Path, model: Path) -> None:
    drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    arguments = ["--served-model-name", MODEL, "--api-key", KEY, "--max-model-len", "1024"]
    arguments += ["--speculative-config", json.dumps(drafts)]
    others = ["http://127.0.0.1:1"]  # of one of ours it is refused

    async def tried() -> None:
        async with session_of(engine) as session:
            await require_samples_of_the_policy(EngineControl(session, model_name=MODEL, tolerance=1e-3))

    with engine_on(free_port(), tmp_path, model, engine_urls=others, engine_args=arguments) as engine:
        assert furthest(engine, Oracle(model), 0.5) > 0.1
        with pytest.raises(EngineError):  # or it is dead by then: an index out of bounds
            asyncio.run(tried())
