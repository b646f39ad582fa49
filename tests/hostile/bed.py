"""The service as it runs in production, control process and worker, over an engine that answers by planted ids."""

import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import create_engine, text

from tests.doubles.engine import CHAT, MODEL
from tests.doubles.warm.process import WarmProcess
from tests.explorer.running import eventually
from tests.explorer.test_main import job, write_settings
from tests.hostile.echo import planted, reply_to
from tests.loop.harness.services import command_of, descendants
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyGrant
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.database import connect

ADMIN_KEY = "an-administrators-key"

_numbers = itertools.count()


def fresh_name() -> str:
    """An id that was in no prompt yet."""
    return f"n{next(_numbers):07d}"


def asking(name: str, **but: Any) -> dict[str, Any]:
    """A request for a chat completion that says `name`."""
    return {"model": MODEL, "messages": [{"role": "user", "content": planted(name)}], "max_tokens": 12} | but


@dataclass
class Bed:
    """A running service, and the ids of the replies that clients have got from it."""

    folder: Path
    process: "subprocess.Popen[bytes]"
    http: httpx.Client
    acknowledged: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return str(self.http.base_url)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def workers(self) -> list[int]:
        """The processes that answer requests."""
        name = "tuneloop.explorer.processes.worker"
        return [pid for pid in descendants(self.process.pid) if name in command_of(pid)]

    def key(self, name: str, tenant: str = "", scopes: Sequence[Scope] = tuple(Scope)) -> str:
        """What a new key's holder sends as `Authorization`. All workers know it."""
        ledger, grant = self.ledger(), KeyGrant(name=name, tenant=tenant or name, scopes=tuple(scopes))
        found = f"Bearer {ledger.keys.create(grant, actor='test')[1]}"
        ledger.close()
        models = self.http.base_url.join("/v1/models")

        def is_known() -> bool:
            answers = httpx.get(models).status_code, httpx.get(models, headers={"Authorization": found}).status_code
            return answers[0] == 401 and answers[1] != 401

        # Workers hear of keys one after the other: each of some connections has to know it.
        eventually(lambda: all(is_known() for _ in range(4)))
        return found

    def ledger(self) -> Ledger:
        return Ledger(connect(f"sqlite:///{job(self.folder)}/buffer/exp_buffer.db"))

    def gauges(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                found[sample.name] += sample.value
        return dict(found)

    def ask(self, client: httpx.Client, **but: Any) -> httpx.Response:
        """Get a reply, which must be the one that was asked for."""
        name = fresh_name()
        answer = client.post(CHAT, json=asking(name, **but))
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        assert [each["message"]["content"] for each in reply["choices"]] == [reply_to(name)] * but.get("n", 1)
        self.acknowledged.append(reply["id"])
        return answer

    def is_sound(self) -> None:
        """Assert that nothing is under way, and that each reply somebody has got is in the ledger exactly once."""
        eventually(lambda: self.gauges()["tuneloop_requests_in_flight"] == 0)
        assert self.gauges()["tuneloop_requests_waiting"] == 0
        eventually(lambda: self.http.post("/commit").status_code == 200)
        ledger = self.ledger()
        try:
            assert ledger.reports.audit() == []
            found = Counter(self.stored_ids())
        finally:
            ledger.close()
        assert [each for each in self.acknowledged if found[each] != 1] == []
        assert "Traceback" not in self.log, self.log[-10_000:]

    def stored_ids(self) -> list[str]:
        """The ids of all exchanges in the ledger."""
        return [row[0] for row in self.rows("SELECT msg_id FROM exchanges")]

    def rows(self, statement: str) -> list[Any]:
        engine = create_engine(f"sqlite:///{job(self.folder)}/buffer/exp_buffer.db")
        with engine.connect() as connection:
            found = list(connection.execute(text(statement)).all())
        engine.dispose()
        return found


@contextmanager
def bed_with(folder: Path, engine_urls: Sequence[str], **explorer: Any) -> Iterator[Bed]:
    """A service with these settings of `explorer`, ready; it must stop by itself in the end."""
    quick = {"service_status_check_interval": 0.2}
    but = {f"explorer__{name}": value for name, value in (quick | explorer).items()}
    settings = write_settings(
        folder,
        explorer__rollout_model__engine_urls=list(engine_urls),
        explorer__admin_key=ADMIN_KEY,
        **but,
    )
    log = folder / "log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "tuneloop.explorer", "--config", str(settings)]
        process = WarmProcess(command, stdout=output, stderr=output)
    try:
        with httpx.Client(base_url=_url(log), timeout=30) as http:
            eventually(lambda: http.get("/health/ready").status_code == 200, within_s=600)
            yield Bed(folder, process, http)
        process.terminate()
        assert process.wait(60) == 0, log.read_text()[-10_000:]
    finally:
        process.kill()
        process.wait()


def _url(log: Path) -> str:
    def found() -> re.Match[str] | None:
        return re.search(r"explorer_listening.*url=(\S+)", log.read_text())

    eventually(lambda: found() is not None, within_s=120)
    listening = found()
    assert listening is not None
    return listening[1]
