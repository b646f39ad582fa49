"""One service over HTTP: feedback, commits, and what it is doing; tried again while it is away."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from tuneloop.runner.errors import ServiceAway, TuneFailed
from tuneloop.runner.key_header import header_of_key
from tuneloop.runner.models.run_calls import StoredCalls

#: Seconds before an answer that did not come is asked for again: so many at first, twice as many each time, at most.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0

_REFUSED_FOR_NOW = {429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStatus:
    """What a service is doing. `settled`: it makes no further step of what it has, and serves its newest version.

    `served` is the version that answers, `newest` the last one made, `step` the trainer's. `sentences` say why no step
    is happening, `held` why the newest version is not served.
    """

    served: int
    newest: int
    step: int
    settled: bool
    states: Mapping[str, int]
    sentences: tuple[str, ...] = ()
    trainer_up: bool = True
    held: str | None = None


class ServiceClient:
    """A service at a URL, without `/v1`. Waits for up to `timeout_s` seconds while it is away.

    `check` is called while it waits, and raises if waiting is in vain.
    """

    def __init__(
        self, url: str, *, api_key: str = "none", timeout_s: float = 300.0, check: Callable[[], None] = lambda: None
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key
        self._timeout_s, self._check = timeout_s, check
        headers = header_of_key(api_key)
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=httpx.Timeout(60.0, connect=5.0))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def until_reached(self, timeout_s: float) -> None:
        """Return when anything answers at its URL, whatever it says."""
        since = time.monotonic()
        while True:
            try:
                await self._http.get("/health/ready", timeout=10.0)
                return
            except (httpx.TransportError, httpx.InvalidURL) as error:
                why = f"{type(error).__name__} {error}".strip()
            if time.monotonic() - since > timeout_s:
                raise ServiceAway(f"nothing answers at {self.url} for {timeout_s:g} s: {why}; is that its URL?")
            await asyncio.sleep(_LONGEST_PAUSE_S / 10)

    async def until_ready(self, timeout_s: float | None = None) -> None:
        """Return when it can answer requests."""
        await self._patiently(lambda: self._http.get("/health/ready", timeout=10.0), timeout_s)

    async def until_answers(self, timeout_s: float) -> None:
        """Return when it lists its models: any OpenAI-compatible service does."""
        await self._patiently(lambda: self._http.get("/v1/models", timeout=10.0), timeout_s)

    async def is_ready(self) -> bool:
        """Whether it can answer requests now."""
        try:
            return (await self._http.get("/health/ready", timeout=10.0)).is_success
        except httpx.TransportError:
            return False

    async def model_name(self) -> str:
        """The name under which it serves the model."""
        answer = await self._patiently(lambda: self._http.get("/v1/models"))
        return str(answer.json()["data"][0]["id"])

    async def options(self) -> dict[str, Any]:
        """How it trains, as far as it says so."""
        answer = await self._patiently(lambda: self._http.get("/training"))
        return dict(answer.json().get("configured") or {})

    async def feedback(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Bring the entries to its disk, and return what became of each run: `task_id/run_id` → outcome."""
        answer = await self._patiently(lambda: self._http.post("/feedback", json={"feedback": list(entries)}))
        return dict(answer.json().get("outcomes", {}))

    async def commit(self, task_ids: Sequence[str]) -> int:
        """Release what is rewarded of these tasks to the trainer, at once; how many experiences that was."""
        answer = await self._patiently(lambda: self._http.post("/commit", json={"task_ids": list(task_ids)}))
        return int(answer.json()["committed"])

    async def calls(self, task_id: str, run_id: str) -> StoredCalls:
        """The replies that a run got."""
        query = {"task_id": task_id, "run_id": run_id, "tokens": "true"}
        answer = await self._patiently(lambda: self._http.get("/training/calls", params=query))
        return StoredCalls.of(answer.json())

    async def status(self) -> TrainingStatus:
        """What it is doing now."""
        found = (await self._patiently(lambda: self._http.get("/training"))).json()
        return TrainingStatus(
            served=found["served"],
            newest=found["newest"],
            step=found["step"],
            settled=found["settled"],
            states=found["experiences"],
            sentences=tuple(reason["sentence"] for reason in found["reasons"]),
            trainer_up=found["trainer_up"],
            held=next((each["sentence"] for each in found["reasons"] if each.get("code") == "promotion_held"), None),
        )

    async def _patiently(
        self, ask: Callable[[], Awaitable[httpx.Response]], timeout_s: float | None = None
    ) -> httpx.Response:
        """Ask until there is an answer. Raises TuneFailed if it refuses for good, ServiceAway if none comes."""
        allowed_s = self._timeout_s if timeout_s is None else timeout_s
        since, pause_s = time.monotonic(), _PAUSE_S
        while True:
            self._check()
            try:
                answer = await ask()
                if answer.is_success:
                    return answer
                why = f"{answer.status_code} {_sentence(answer)}"
                if answer.status_code not in _REFUSED_FOR_NOW:
                    raise TuneFailed(f"the service at {self.url} refuses {answer.request.url.path}: {why}")
            except httpx.TransportError as error:
                why = f"{type(error).__name__} {error}".strip()
            if time.monotonic() - since > allowed_s:
                raise ServiceAway(f"the service at {self.url} did not answer for {allowed_s:g} s: {why}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _sentence(answer: httpx.Response) -> str:
    try:
        body = answer.json()
        return str((body.get("error") or {}).get("message") or body.get("reason") or body)[:300]
    except (ValueError, AttributeError):
        return answer.text[:300]
