"""The explorer in front of real vLLM: what is recorded is what was sampled, and a reload is one."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import httpx
import openai
import pytest
from sqlalchemy import func, select

from tests.loop.harness.agent import PATIENCE
from tests.loop.harness.bare_engine import MODEL
from tests.loop.harness.oracle import Oracle
from tests.loop.harness.services import Service, commit, stage_by_hand, wait_until_served
from tuneloop.shared.experience import Sample
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.ledger.storage.schema import experiences

pytestmark = [pytest.mark.vllm, pytest.mark.contract]

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture
def client(explorer: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{explorer.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def ask(content: str, **but: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], **but}


def samples_of(ledger: Ledger, explorer: Service, msg_ids: list[str]) -> list[Sample]:
    """Reward, commit and lease just these replies."""
    told = {"msg_ids": msg_ids, "reward": 1}
    httpx.post(f"{explorer.url}/feedback", json=told, timeout=60).raise_for_status()
    committed = commit(explorer.url)
    epoch = ledger.training.take_epoch("test")
    samples = ledger.training.lease(epoch, committed, BatchRules())
    ledger.training.drop(epoch, [sample.id for sample in samples], "seen by a test")
    return samples


def test_recorded_logprobs_are_those_of_the_distribution_sampled_from(
    client: openai.OpenAI, explorer: Service, ledger: Ledger
) -> None:
    model, msg_ids = explorer.settings.served_model_name, []
    for temperature in (1.0, 0.7, 1.5):
        whole = client.chat.completions.create(model=model, **ask("hello", temperature=temperature, n=2))
        msg_ids.append(whole.id)
        for piece in client.chat.completions.create(model=model, stream=True, **ask("hi", temperature=temperature)):
            last = piece.id
        msg_ids.append(last)
    samples = samples_of(ledger, explorer, msg_ids)
    champion = ledger.versions.champion()
    oracle = Oracle(champion.path / "actor" if champion.version else champion.path)
    assert len(samples) == 9
    for sample in samples:
        expected = oracle.logprobs(sample.prompt_ids.tolist(), sample.completion_ids.tolist(), sample.temperature)
        assert sample.logprobs.tolist() == pytest.approx(expected, abs=1e-4)


def test_tools_pass_through_and_the_exchange_is_recorded(
    client: openai.OpenAI, explorer: Service, ledger: Ledger
) -> None:
    reply = client.chat.completions.create(
        model=explorer.settings.served_model_name, tools=[WEATHER], **ask("weather in Paris?", max_tokens=8)
    )
    [sample] = samples_of(ledger, explorer, [reply.id])
    assert reply.usage is not None
    assert len(sample.prompt_ids) == reply.usage.prompt_tokens
    assert b"weather" in bytes(i for i in sample.prompt_ids.tolist() if i < 256) or len(sample.prompt_ids) > 100


def test_a_call_that_the_limit_cuts_off_is_kept_as_such(
    client: openai.OpenAI, explorer: Service, ledger: Ledger
) -> None:
    """Whatever vLLM calls its end: of a named function `stop` or `tool_calls`."""
    model, named = explorer.settings.served_model_name, {"type": "function", "function": {"name": "weather"}}
    asked = ask("weather in Paris?", tools=[WEATHER], tool_choice=named, max_tokens=4)
    whole = client.chat.completions.create(model=model, **asked)
    streamed = [piece.id for piece in client.chat.completions.create(model=model, stream=True, **asked)][-1]
    samples_of(ledger, explorer, [whole.id, streamed])
    rows = select(experiences.c.finish_reason, experiences.c.completion_tokens)
    with ledger.transactions.write() as connection:
        kept = connection.execute(rows.where(experiences.c.msg_id.in_([whole.id, streamed]))).all()
    assert [tuple(row) for row in kept] == [("length", 4)] * 2, whole.choices[0].finish_reason


def test_what_the_client_did_not_ask_for_does_not_reach_it(client: openai.OpenAI, explorer: Service) -> None:
    model = explorer.settings.served_model_name
    plain = client.chat.completions.create(model=model, **ask("hi")).model_dump()
    asked = client.chat.completions.create(model=model, logprobs=True, **ask("hi")).model_dump()
    assert plain["choices"][0]["logprobs"] is None
    assert plain["prompt_token_ids"] is None
    assert asked["choices"][0]["logprobs"]["content"]


def test_a_seed_does_not_kill_a_cpu_engine_and_is_said_to_be_ignored(client: openai.OpenAI, explorer: Service) -> None:
    reply = client.chat.completions.with_raw_response.create(
        model=explorer.settings.served_model_name, seed=7, **ask("hi")
    )
    assert reply.headers["x-tuneloop-ignored"] == "seed"


def greedy(http: httpx.Client, model: str, content: str) -> tuple[str, list[float]]:
    body = ask(content, model=model, temperature=0, max_tokens=12, logprobs=True)
    choice = http.post("/v1/chat/completions", json=body, timeout=60).raise_for_status().json()["choices"][0]
    return choice["message"]["content"], [each["logprob"] for each in choice["logprobs"]["content"]]


async def stream_whole(http: httpx.AsyncClient, model: str, number: int) -> tuple[str, str]:
    """One long stream: its finish reason and the version that began it.

    Read by as light a client as can be: one that is slower than the engine would leave it idle between two streams.
    """
    # However the weights turn out, some stream is under way when they are swapped.
    body = ask(f"tell me about {number}", model=model, max_tokens=800, stream=True, ignore_eos=True)
    ending = b""
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        async for piece in reply.aiter_raw():
            ending = ending[-4096:] + piece
    *_, last, done = (line.removeprefix(b"data: ") for line in ending.splitlines() if line)
    assert done == b"[DONE]"
    return json.loads(last)["choices"][0]["finish_reason"], reply.headers["x-tuneloop-version"]


async def reload_under_load(explorer: Service, ledger: Ledger, seed: int) -> tuple[int, list[tuple[str, str]]]:
    """Keep eight streams in flight until a new version is served, and let eight more begin on it."""
    # Not while streams are read: it would keep this process from reading them.
    register = stage_by_hand(explorer.settings, ledger, seed)
    served = asyncio.Event()
    done: list[tuple[str, str]] = []

    async def lane(number: int) -> None:
        while not served.is_set():
            done.append(await stream_whole(http, explorer.settings.served_model_name, number))
        done.append(await stream_whole(http, explorer.settings.served_model_name, number))

    async with httpx.AsyncClient(base_url=explorer.url, timeout=120) as http, asyncio.TaskGroup() as lanes:
        for number in range(8):
            lanes.create_task(lane(number))
        await asyncio.sleep(1)
        version = await asyncio.to_thread(register)
        await asyncio.to_thread(wait_until_served, ledger, version)
        served.set()
    return version, done


def test_after_a_reload_under_load_the_engine_answers_as_one_that_was_started_with_that_checkpoint(
    explorer: Service, ledger: Ledger, model: Path, bare_engine: httpx.Client
) -> None:
    name = explorer.settings.served_model_name
    # Longer than a cache block, and asked before the reload: stale keys and values would show.
    questions = [f"{number} " + "once upon a time " * 12 for number in range(12)]
    wait_until_served(ledger, stage_by_hand(explorer.settings, ledger, seed=11)())
    with httpx.Client(base_url=explorer.url, timeout=60) as http:
        before = [greedy(http, name, question) for question in questions]
        # The other engine has had these weights from its start.
        version, streams = asyncio.run(reload_under_load(explorer, ledger, seed=0))
        after = [greedy(http, name, question) for question in questions]
    assert {reason for reason, _ in streams} <= {"length", "stop"}
    assert {began for _, began in streams} >= {str(version)}
    champion = ledger.versions.champion()
    assert champion.version == version
    weights = "model.safetensors"
    assert (champion.path / "actor" / weights).read_bytes() == (model / weights).read_bytes()
    truth = [greedy(bare_engine, MODEL, question) for question in questions]
    assert [text for text, _ in after] == [text for text, _ in truth]
    for (_, found), (_, expected) in zip(after, truth, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    assert before != after


def test_replies_that_two_versions_wrote_are_kept_and_marked(explorer: Service, ledger: Ledger) -> None:
    before, began = of_two_versions(explorer), []
    for seed in (12, 13, 14):  # if this process reads too slowly, the engine may have nothing to do when it reloads
        _, streams = asyncio.run(reload_under_load(explorer, ledger, seed))
        assert {reason for reason, _ in streams} == {"length"}
        began.append(Counter(version for _, version in streams))
        commit(explorer.url)
        if of_two_versions(explorer) > before:
            return
    raise AssertionError(f"no reply of two versions was marked; they began with {began}")


def of_two_versions(explorer: Service) -> int:
    engine = connect(explorer.settings.database_url)
    with engine.connect() as connection:
        marked = select(func.count()).where(experiences.c.unsampled == "mixed_version")
        count: int = connection.execute(marked).scalar_one()
    engine.dispose()
    return count


def test_the_engine_has_no_route_of_its_own_through_us(explorer: Service) -> None:
    for route in ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/sleep", "/v1/load_lora_adapter"):
        reply = httpx.post(f"{explorer.url}{route}", content=json.dumps({}), timeout=60)
        assert reply.status_code == 404, route
