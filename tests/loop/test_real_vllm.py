"""The explorer in front of real vLLM: what is recorded is what was sampled, and a reload is one."""

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest
from sqlalchemy import func, select

from explorer import vllm_api
from shared.config import Settings
from shared.database import connect
from shared.experience import Sample
from shared.ledger import BatchPolicy, Ledger
from shared.schema import experiences
from tests.loop.oracle import Oracle
from tests.loop.services import Service, publish_by_hand, wait_for, wait_until_served

pytestmark = pytest.mark.vllm

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture
def client(explorer: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{explorer.url}/v1", api_key="none", max_retries=0)


def ask(content: str, **but: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], **but}


def samples_of(ledger: Ledger, explorer: Service, msg_ids: list[str]) -> list[Sample]:
    """Reward, commit and lease just these replies."""
    httpx.post(f"{explorer.url}/feedback", json={"msg_ids": msg_ids, "reward": 1}).raise_for_status()
    committed = httpx.post(f"{explorer.url}/commit").json()["committed"]
    epoch = ledger.take_epoch("test")
    samples = ledger.lease(epoch, committed, BatchPolicy())
    ledger.drop(epoch, [sample.id for sample in samples], "seen by a test")
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
    champion = ledger.champion()
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


class Fresh:
    """A vLLM that has never served anything but one folder of weights."""

    def __init__(self, settings: Settings, actor: Path, folder: Path) -> None:
        self._socket = folder / "fresh.sock"
        with (folder / "fresh.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "explorer.guard", *vllm_api.command(settings, model=actor, socket=self._socket)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=vllm_api.environment(settings, 0),
            )
        self.http = httpx.Client(transport=httpx.HTTPTransport(uds=str(self._socket)), base_url="http://engine")

    def wait_until_ready(self) -> None:
        wait_for(self._listening, timeout_s=240, why="the fresh engine did not start")
        wait_for(lambda: self.http.get("/health").status_code == 200, timeout_s=60)

    def _listening(self) -> bool:
        with socket.socket(socket.AF_UNIX) as knocking:
            return knocking.connect_ex(str(self._socket)) == 0

    def stop(self) -> None:
        self.http.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def greedy(http: httpx.Client, model: str, content: str) -> tuple[str, list[float]]:
    body = ask(content, model=model, temperature=0, max_tokens=12, logprobs=True)
    choice = http.post("/v1/chat/completions", json=body, timeout=60).raise_for_status().json()["choices"][0]
    return choice["message"]["content"], [each["logprob"] for each in choice["logprobs"]["content"]]


async def stream_whole(url: str, model: str, number: int) -> tuple[str, str]:
    """One long stream: its finish reason and the version that began it."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    async with client:
        raw = await client.chat.completions.with_raw_response.create(
            # However the weights turn out, some stream is under way when they are swapped.
            model=model,
            stream=True,
            extra_body={"ignore_eos": True},
            **ask(f"tell me about {number}", max_tokens=200),
        )
        reason = ""
        async for piece in raw.parse():
            reason = piece.choices[0].finish_reason or reason
        return reason, raw.headers["x-tuneloop-version"]


async def load_until(url: str, model: str, served: "asyncio.Future[None]") -> list[tuple[str, str]]:
    """Keep eight streams in flight until a version is served, and a little longer."""
    done: list[tuple[str, str]] = []

    async def lane(number: int) -> None:
        while not served.done():
            done.append(await stream_whole(url, model, number))
        done.append(await stream_whole(url, model, number))

    await asyncio.gather(*(lane(number) for number in range(8)))
    return done


async def reload_under_load(explorer: Service, ledger: Ledger, seed: int) -> tuple[int, list[tuple[str, str]]]:
    served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    load = asyncio.create_task(load_until(explorer.url, explorer.settings.served_model_name, served))
    await asyncio.sleep(1)
    version = await asyncio.to_thread(publish_by_hand, explorer.settings, ledger, seed)
    await asyncio.to_thread(wait_until_served, ledger, version)
    served.set_result(None)
    return version, await load


def test_after_a_reload_under_load_the_engine_answers_as_a_fresh_one_on_that_checkpoint(
    explorer: Service, ledger: Ledger, tmp_path: Path
) -> None:
    model = explorer.settings.served_model_name
    # Longer than a cache block, and asked before the reload: stale keys and values would show.
    questions = [f"{number} " + "once upon a time " * 12 for number in range(12)]
    with httpx.Client(base_url=explorer.url) as http:
        before = [greedy(http, model, question) for question in questions]
        version, streams = asyncio.run(reload_under_load(explorer, ledger, seed=11))
        after = [greedy(http, model, question) for question in questions]
    assert {reason for reason, _ in streams} <= {"length", "stop"}
    assert {began for _, began in streams} >= {str(version)}
    champion = ledger.champion()
    assert champion.version == version
    fresh = Fresh(explorer.settings, champion.path / "actor", tmp_path)
    try:
        fresh.wait_until_ready()
        truth = [greedy(fresh.http, model, question) for question in questions]
    finally:
        fresh.stop()
    assert [text for text, _ in after] == [text for text, _ in truth]
    for (_, found), (_, expected) in zip(after, truth, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    assert before != after


def test_replies_that_two_versions_wrote_are_kept_and_marked(explorer: Service, ledger: Ledger) -> None:
    before = of_two_versions(explorer)
    asyncio.run(reload_under_load(explorer, ledger, seed=12))
    wait_for(lambda: of_two_versions(explorer) > before, timeout_s=30, why="no reply of two versions was marked")


def of_two_versions(explorer: Service) -> int:
    engine = connect(explorer.settings.database_url)
    with engine.connect() as connection:
        marked = select(func.count()).where(experiences.c.unsampled == "mixed_version")
        count: int = connection.execute(marked).scalar_one()
    engine.dispose()
    return count


def test_the_engine_has_no_route_of_its_own_through_us(explorer: Service) -> None:
    for route in ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/sleep", "/v1/load_lora_adapter"):
        reply = httpx.post(f"{explorer.url}{route}", content=json.dumps({}))
        assert reply.status_code == 404, route
