"""The commands of deploy/compose/compose.yaml, started with the environment that compose gives them.

Instead of containers there are folders, instead of the engine a double; PostgreSQL and Prometheus are real.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.databases import Schemas
from tests.deploy.prometheus import ROOT, prometheus_running
from tests.doubles.engine import CHAT, MODEL, engine_place
from tests.explorer.running import HELLO, eventually
from tests.loop.harness.services import free_port, make_model, started

pytestmark = pytest.mark.contract

FOLDER = ROOT / "deploy" / "compose"
SERVICES = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
VARIABLES = {"TUNELOOP_ADMIN_KEY": "an-administrators-key", "POSTGRES_PASSWORD": "a-password", "MODEL_DIR": "/model"}
SCHEMA = "compose"


@dataclass
class Compose:
    """What compose does for a service, with folders instead of containers."""

    folder: Path
    database: str
    engine: str
    port: int

    def argv(self, name: str) -> list[str]:
        """The command line of a service: its entrypoint, which is the image's if it has none of its own."""
        service = SERVICES[name]
        entrypoint = service.get("entrypoint", [str(Path(sys.executable).with_name("tuneloop"))])
        return [self._here(each) for each in [*entrypoint, *service["command"]]]

    def environment(self, name: str) -> dict[str, str]:
        given = {key: self._here(value) for key, value in SERVICES[name]["environment"].items()}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, **given, **self._instead(), "PATH": path, "TUNELOOP_LOG_JSON": "1"}

    def _instead(self) -> Mapping[str, str]:
        """What is another here than in a container."""
        return {
            "TUNELOOP__EXPLORER__ROLLOUT_MODEL__ENGINE_URLS": f"[{self.engine}]",
            "TUNELOOP__EXPLORER__PROXY_PORT": str(self.port),
            "TUNELOOP__MODEL__SERVED_MODEL_NAME": MODEL,
            "TUNELOOP__BUFFER__TRAINER_INPUT__EXPERIENCE_BUFFER__NAME": SCHEMA,
        }

    def _here(self, text: str) -> str:
        """A text of the file with its variables filled in, and this machine's folders and database."""
        filled = re.sub(r"\$\{([A-Z_]+)[^}]*\}", lambda found: VARIABLES[found[1]], text)
        filled = filled.replace("postgresql://tuneloop:a-password@postgres:5432/tuneloop", self.database)
        return re.sub(
            r"(/etc/tuneloop|/var/lib/tuneloop|/var/spool/tuneloop|/run/metrics-key|/models)\b",
            rf"{self.folder}\1",
            filled,
        )

    def prepare(self) -> None:
        """Make what the volumes would bring."""
        for each in ("etc/tuneloop", "var/lib/tuneloop", "var/spool/tuneloop", "run/metrics-key", "models"):
            (self.folder / each).mkdir(parents=True)
        make_model(self.folder / "models" / "model")
        (self.folder / "etc/tuneloop/tuneloop.yaml").write_text(self._here((FOLDER / "tuneloop.yaml").read_text()))

    @contextmanager
    def running(self, name: str) -> Iterator["subprocess.Popen[bytes]"]:
        process = started(self.argv(name), self.folder / f"{name}.log", environment=self.environment(name))
        try:
            yield process
        finally:
            process.terminate()
            process.wait(90)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


@pytest.fixture
def compose(tmp_path: Path, postgres_url: str, schemas: Schemas) -> Iterator[Compose]:
    with engine_place() as place:
        found = Compose(tmp_path, postgres_url, place.fresh().url, free_port())
        found.prepare()
        yield found
        schemas.drop(SCHEMA)


@pytest.mark.postgres
def test_the_services_of_compose_start_serve_and_are_scraped(compose: Compose, tmp_path: Path) -> None:
    setup = subprocess.run(compose.argv("setup"), env=compose.environment("setup"), timeout=300, check=False)
    assert setup.returncode == 0
    key_file = tmp_path / "run/metrics-key/tuneloop_metrics_key"
    key = key_file.read_text()
    again = subprocess.run(compose.argv("setup"), env=compose.environment("setup"), timeout=300, check=False)
    assert (again.returncode, key_file.read_text()) == (0, key)
    with ExitStack() as stack:
        explorer = stack.enter_context(compose.running("explorer"))
        trainer = stack.enter_context(compose.running("trainer"))
        http = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{compose.port}", timeout=60))

        def is_ready() -> bool:
            assert explorer.poll() is None, compose.log("explorer")
            try:
                return http.get("/health/ready").status_code == 200
            except httpx.TransportError:
                return False

        eventually(is_ready, within_s=300)
        assert http.post(CHAT, json=HELLO).status_code == 401
        admin = {"Authorization": f"Bearer {VARIABLES['TUNELOOP_ADMIN_KEY']}"}
        assert http.post(CHAT, json=HELLO, headers=admin).status_code == 200
        assert http.post(CHAT, json=HELLO, headers={"Authorization": f"Bearer {key.strip()}"}).status_code == 403
        _page_opens(http.base_url)
        scraped = stack.enter_context(
            prometheus_running(tmp_path / "prometheus", f"127.0.0.1:{compose.port}", key_file=key_file)
        )

        def is_up() -> bool:
            assert trainer.poll() is None, compose.log("trainer")
            return scraped.value("tuneloop_trainer_up") == 1 and scraped.value("tuneloop_database_up") == 1

        eventually(is_up, within_s=300)
        assert scraped.value("up") == 1


def _page_opens(url: httpx.URL) -> None:
    """As in a browser: the administrator logs in, and each page comes with all that it loads."""
    with httpx.Client(base_url=url, timeout=60, follow_redirects=True) as browser:
        asked = browser.get("/ui")
        assert (asked.status_code, asked.url.path) == (200, "/ui/login")
        shown = browser.post("/ui/login", data={"key": VARIABLES["TUNELOOP_ADMIN_KEY"], "next": "/ui"})
        assert (shown.status_code, shown.url.path) == (200, "/ui")
        pages = re.findall(r'<a href="(/ui[\w/]*)"', shown.text.partition("<nav")[2].partition("</nav>")[0])
        assert {"/ui", "/ui/exchanges", "/ui/versions", "/ui/preferences", "/ui/trainer", "/ui/doctor"} <= {*pages}
        loaded = set[str]()
        for page in pages:
            answer = browser.get(page)
            assert (page, answer.status_code) == (page, 200)
            assert answer.headers["content-type"].startswith("text/html")
            loaded |= {*re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="([^"]+)"', answer.text)}
        assert len([each for each in loaded if each.endswith(".js")]) >= 3
        for each in loaded:
            found = browser.get(each)  # nothing of it is another host's
            kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}[each.rpartition(".")[2]]
            assert (each, found.status_code, found.headers["content-type"].partition(";")[0]) == (each, 200, kind)
            assert found.content


def settings_of(name: str) -> dict[str, Any]:
    return {key: value for key, value in SERVICES[name]["environment"].items() if key.startswith("TUNELOOP__")}


def test_explorer_and_trainer_get_the_same_environment() -> None:
    assert settings_of("explorer") == settings_of("trainer") == settings_of("setup")
