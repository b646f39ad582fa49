"""Tenants with different answers to the same questions: each policy learns its own, which a shared model cannot.

python -m examples.policies.main                       # twenty policies on one engine
python -m examples.policies.main --shared              # the same tenants on one model
python -m examples.policies.main --tenants 1           # one tenant alone: the bar
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from examples.sums.drive import MAX_TOKENS
from examples.sums.folder import MODEL_NAME, Folder
from examples.sums.loop import url_of
from examples.sums.model import build, save
from examples.sums.services import Services
from examples.sums.task import ALL
from examples.sums.warmup import warm_up
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.operations.policy_report import list_policies
from tuneloop.shared.settings.settings import Settings

ROWS, MEASURED, AT_ONCE = 32, 100, 32
_READY_S = 300.0
#: The tenant that wants the sum, and the one behind it the first term. A start model hardly ever says 18 or 19.
_SUMS = 18


class Tenant:
    """A tenant wants one number as each answer; of twenty, two want the sum and its first term."""

    def __init__(self, number: int, url: str, key: str, *, shared: bool) -> None:
        self.name = f"tenant-{number}"
        self._number = number
        self._model = MODEL_NAME if shared else self.name
        self._chat = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120.0)
        self._http = httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=120.0)

    async def ask(self, questions: Sequence[str], places: asyncio.Semaphore, *, train: bool) -> float:
        """The share of right answers; with `train` each reply gets its reward."""

        async def one(question: str) -> float:
            async with places:
                reply = await self._chat.chat.completions.create(
                    model=self._model,
                    messages=[{"role": "user", "content": question}],
                    max_tokens=MAX_TOKENS,
                    temperature=1.0,
                    extra_body={"metadata": {"train": str(train).lower()}},
                )
                right = float((reply.choices[0].message.content or "").strip() == self._answer(question))
                if train:
                    body = {"msg_ids": [reply.id], "reward": right}
                    (await self._http.post("/feedback", json=body)).raise_for_status()
                return right

        return sum(await asyncio.gather(*map(one, questions))) / len(questions)

    def _answer(self, question: str) -> str:
        left, right = question.rstrip("=").split("+")
        wanted = (int(left) + int(right), int(left))
        return str(self._number if self._number < _SUMS else wanted[self._number - _SUMS])

    async def commit(self) -> None:
        """Commit rewarded replies."""
        (await self._http.post("/commit", json={})).raise_for_status()


async def run(options: argparse.Namespace, settings: Settings, key: str, services: Services) -> dict[str, Any]:
    """Measure, teach, measure again."""
    url, places = url_of(settings), asyncio.Semaphore(AT_ONCE)
    await _until_ready(url, services)
    tenants = [Tenant(number, url, key, shared=options.shared) for number in range(options.tenants)]
    questions = [each.question for each in ALL]
    before = [await each.ask(questions[:MEASURED], places, train=False) for each in tenants]
    began = time.monotonic()
    with closing(Ledger.of(settings)) as ledger:
        for step in range(1, options.steps + 1):
            asked = [each.ask(questions[step % 3 :: 3][:ROWS], places, train=True) for each in tenants]
            rewards = await asyncio.gather(*asked)
            print(f"step {step:3d}: {sum(rewards) / len(rewards):.2f} of the answers right", flush=True)
            while not await asyncio.to_thread(_are_served, ledger, options, step):
                services.check()
                await tenants[0].commit()  # commits what reached the ledger since
                await asyncio.sleep(0.2)
    after = [await each.ask(questions[:MEASURED], places, train=False) for each in tenants]
    return {
        "tenants": options.tenants,
        "shared": options.shared,
        "before": before,
        "after": after,
        "least": min(after),
        "mean": sum(after) / len(after),
        "seconds": round(time.monotonic() - began, 1),
    }


def _are_served(ledger: Ledger, options: argparse.Namespace, step: int) -> bool:
    """Whether every policy has made so many steps and serves them."""
    rows = [each for each in list_policies(ledger) if (each.name == "default") is options.shared]
    steps = step * options.tenants if options.shared else step
    return all(each.steps >= steps and each.served == each.newest for each in rows)


async def _until_ready(url: str, services: Services) -> None:
    ends = time.monotonic() + _READY_S
    async with httpx.AsyncClient(base_url=url, timeout=5.0) as client:
        while time.monotonic() < ends:
            services.check()
            try:
                if (await client.get("/health/ready")).is_success:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
    raise TimeoutError(f"the service was not ready after {_READY_S:.0f} s\n{services.last_words()}")


def changes_of(options: argparse.Namespace) -> dict[str, Any]:
    """Changes of the demo's settings."""
    names = [] if options.shared else [f"tenant-{number}" for number in range(options.tenants)]
    return {
        "model": {"lora": {"rank": 8, "resident": max(1, len(names))}},
        "algorithm": {
            "algorithm_type": "reinforce",
            "optimizer": {"lr": 4e-3, "betas": [0.9, 0.99]},
            "mini_batches": 1,
        },
        "buffer": {"train_batch_size": ROWS},
        "policies": {name: {} for name in names},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; returns 0 if each tenant is right in most cases, as no shared model is."""
    parser = argparse.ArgumentParser(prog="python -m examples.policies.main", description=__doc__)
    parser.add_argument("--tenants", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30, help="training steps of each")
    parser.add_argument("--shared", action="store_true", help="one model for all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("policies-run"), help="where everything goes")
    options = parser.parse_args(arguments)
    folder = Folder(options.dir.absolute())
    with folder.start_afresh():
        settings = folder.write_settings(seed=options.seed, changes=changes_of(options))
        folder.make_keys(settings)
        model, words = build(options.seed)
        warm_up(model, words, options.seed, lambda done, of: None)
        save(model, words, folder.model)
        logs = {name: folder.log(name) for name in ("explorer", "trainer")}
        with Services(("explorer", "trainer"), config=folder.settings, logs=logs) as services:
            result = asyncio.run(run(options, settings, folder.key.read_text(), services))
    folder.summary.write_text(json.dumps(result) + "\n")
    print(f"right answers: {sum(result['before']) / options.tenants:.2f} -> {result['mean']:.2f},", end=" ")
    print(f"the worst tenant {result['least']:.2f}, {result['seconds']:.0f} s")
    return 0 if result["least"] > 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
