"""A whole explorer, under a real uvicorn in a thread, attached to engine doubles."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import create_engine, text

from tests.constants import settings_of
from tests.databases import engine_of, put_file
from tests.doubles.engine import MODEL
from tests.doubles.serving import serving
from tests.explorer.checkpoints import write_model
from tests.explorer.whole import create_app
from tests.outboxes import records_in
from tuneloop.explorer import recorder
from tuneloop.explorer.app import Services
from tuneloop.explorer.edge import Edge
from tuneloop.explorer.processes.services import ControlServices
from tuneloop.explorer.routes import stored_completions
from tuneloop.shared.errors import LedgerForbidden, LedgerUnavailable, TuneloopError
from tuneloop.shared.experience import Exchange, Feedback, Record, State
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.ledger.recording.feedback import FeedbackResults
from tuneloop.shared.ledger.recording.recording import CommitLimits, Recording
from tuneloop.shared.ledger.versions.alarms import Alarms
from tuneloop.shared.ledger.versions.versions import Versions
from tuneloop.shared.settings.serving import LoraSettings
from tuneloop.shared.settings.settings import Settings

HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "3+4="}], "max_tokens": 12, "temperature": 1.0}


class MoodyRecording(Recording):
    """Takes records unless the database is away, or refuses some, as the test wants."""

    away = False
    forbids = False
    refuses: Callable[[Record], bool] = staticmethod(lambda record: False)

    def record(
        self,
        records: Sequence[Record],
        places: Sequence[tuple[str, int]] = (),
        known: Mapping[str, int] = MappingProxyType({}),
    ) -> FeedbackResults:
        if self.away:
            raise LedgerUnavailable("away")
        if self.forbids:
            raise LedgerForbidden("permission denied for table experiences")
        if any(self.refuses(each) for each in records):
            raise ValueError("refused")
        return super().record(records, places, known)

    def commit(self, tenant: str, **limits: Unpack[CommitLimits]) -> int:
        if self.away:
            raise LedgerUnavailable("away")
        return super().commit(tenant, **limits)


class CountingVersions(Versions):
    """Counts how often it is looked at for a new version."""

    looks = 0

    def pinned_version(self) -> Version | None:
        self.looks += 1
        return super().pinned_version()


class CountingAlarms(Alarms):
    """Counts how often it is read whether promotions are held."""

    looks = 0

    def promotion_held(self, policy: int | None = None) -> bool:
        self.looks += 1
        return super().promotion_held(policy)


class MoodyLedger(Ledger):
    """A ledger whose database goes away and comes back as the test wants, or refuses some records."""

    recording: MoodyRecording
    versions: CountingVersions
    alarms: CountingAlarms

    def __init__(self, *arguments: Any, **rules: Any) -> None:
        super().__init__(*arguments, **rules)
        self.recording = MoodyRecording(self.transactions, self.rewards)
        self.versions, self.alarms = CountingVersions(self.transactions), CountingAlarms(self.transactions)


def settings_for(
    tmp_path: Path, urls: Sequence[str] = (), rollout: dict[str, Any] | None = None, **explorer: Any
) -> Settings:
    """Settings of an experiment below `tmp_path`, with a tiny model there; constants may stand in them."""
    return settings_of(
        {
            "checkpoint_root_dir": tmp_path / "checkpoints",
            "rollout": rollout or {},
            "model": {"model_path": write_model(tmp_path / "model"), "served_model_name": MODEL},
            "explorer": {
                "rollout_model": {"engine_urls": list(urls), "dtype": "float32"},
                "listen_address": "127.0.0.1",
                "proxy_port": 0,
                "service_status_check_interval": 0.1,
                "request_timeout": 30,
            }
            | explorer,
        }
    )


@contextmanager
def adapters_running(tmp_path: Path, url: str, **explorer: Any) -> Iterator["RunningExplorer"]:
    """An explorer over one engine double whose versions are adapters."""
    settings = settings_for(tmp_path, [url], **explorer)
    model = settings.model.model_copy(update={"lora": LoraSettings(rank=4)})
    with explorer_running(settings.model_copy(update={"model": model})) as running:
        yield running


def open_ledger(settings: Settings) -> MoodyLedger:
    """The ledger of the experiment, made if need be."""
    url = f"sqlite:///{settings.job_dir}/ledger.db"
    put_file(url)
    ledger = MoodyLedger(engine_of(url), rule=settings.reward)
    ledger.versions.ensure_base(settings.model.model_path.absolute())
    return ledger


@dataclass
class RunningExplorer:
    """An explorer that is up, and what a test wants to know of it."""

    url: str
    app: Edge
    settings: Settings
    ledger: MoodyLedger
    http: httpx.Client
    failures: list[TuneloopError] = field(default_factory=list)

    @property
    def services(self) -> Services:
        found: Services = self.app.app.state.services
        return found

    @property
    def control(self) -> ControlServices:
        found: ControlServices = self.app.app.state.control
        return found

    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="dummy", max_retries=0)

    def openai_async(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="dummy", max_retries=0)

    def chat(self, **but: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=HELLO | but)

    def feedback(self, *msg_ids: str, reward: float = 1.0, **more: Any) -> httpx.Response:
        return self.http.post("/feedback", json={"msg_ids": list(msg_ids), "reward": reward, **more})

    def commit(self, **body: Any) -> httpx.Response:
        return self.http.post("/commit", json=body)

    def records(self) -> list[Record]:
        """Everything on disk that was not forgotten, oldest first."""
        return records_in(self.settings.outbox_dir)

    def exchanges(self) -> list[Exchange]:
        return [each for each in self.records() if isinstance(each, Exchange)]

    def feedbacks(self) -> list[Feedback]:
        return [each for each in self.records() if isinstance(each, Feedback)]

    def until_flushed(self) -> None:
        """Wait until all that was acknowledged is in the database."""

        def is_taken() -> bool:
            waiter: Future[bool] = Future()
            self.control.drain._waiting.append(waiter)
            self.control.drain.wake()
            return waiter.result(60)

        eventually(is_taken)

    def until_looked(self) -> None:
        """Wait until it has looked for a new version, and has done all that it does about one."""
        until = self.ledger.versions.looks + 2
        eventually(lambda: self.ledger.versions.looks >= until)

    def counts(self) -> dict[State, int]:
        """Experiences per state, after all that was acknowledged has reached the database."""
        self.until_flushed()
        return self.ledger.reports.counts()

    def rows(self, statement: str) -> list[Any]:
        self.until_flushed()
        engine = create_engine(f"sqlite:///{self.settings.job_dir}/ledger.db")
        with engine.connect() as connection:
            found = list(connection.execute(text(statement)).all())
        engine.dispose()
        return found

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics by name, summed over their labels."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def decisions(self, action: str) -> int:
        """How many decisions of that kind about versions /metrics counts."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        counted = [each for each in samples if each.name == "tuneloop_version_decisions_total"]
        return int(sum(each.value for each in counted if each.labels["action"] == action))

    def version(self) -> int:
        """The version that answers a request now."""
        return int(self.chat().headers["x-tuneloop-version"])


def eventually(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait until something holds. What takes long is not kept from its core by being looked at all the time."""
    began = time.monotonic()
    while not holds():
        waited = time.monotonic() - began
        assert waited < within_s, "it never came true"
        time.sleep(min(max(waited / 10, 0.005), 0.1))


@contextmanager
def explorer_running(settings: Settings, ledger: MoodyLedger | None = None) -> Iterator[RunningExplorer]:
    """An explorer, ready, until the block ends; over its experiment's ledger unless another is given."""
    ledger = ledger or open_ledger(settings)
    failures: list[TuneloopError] = []
    app = create_app(settings, ledger, on_failure=failures.append)
    with pytest.MonkeyPatch.context() as patch, serving(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        # A disk may stand still for seconds.
        patch.setattr(recorder, "_PATIENCE_S", 30.0)
        patch.setattr(stored_completions, "_FLUSH_TIMEOUT_S", 30.0)
        eventually(lambda: http.get("/health/ready").status_code == 200)
        yield RunningExplorer(url, app, settings, ledger, http, failures)
    ledger.close()
