"""deploy/prometheus and deploy/grafana, by a real Prometheus that scrapes a running explorer: names, rules, panels."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
import yaml

from tests.constants import section_of
from tests.deploy.prometheus import FOLDER, ROOT, RunningPrometheus, prometheus_running, promtool
from tests.doubles.engine import EngineDouble, engine_place
from tests.explorer.checkpoints import register
from tests.explorer.conftest import Run
from tests.explorer.conftest import doubles as doubles
from tests.explorer.conftest import places as places
from tests.explorer.conftest import running_explorer as running_explorer
from tests.explorer.conftest import warm_verifier as warm_verifier
from tests.explorer.processes.test_workers import chat, hired
from tests.explorer.running import RunningExplorer, eventually, explorer_running, settings_for
from tests.explorer.versions.test_reload import candidate, until_ready
from tests.factories import committed
from tests.house.documents.page_files import part_below
from tests.loop.harness.services import free_port
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.capacity.pace import VersionPace
from tuneloop.shared.ledger.ledger import Alarm
from tuneloop.shared.logging import LOG
from tuneloop.shared.operations import diagnosis
from tuneloop.shared.settings.feedback import JudgeSettings, PrivacySettings

DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "tuneloop.json"
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
NAMES = [rule["alert"] for rule in RULES]

#: Each time a metric of ours is named, without what a counter or a histogram adds.
_METRIC = re.compile(r"\btuneloop_[a-z_]+?(?=(?:_total|_bucket|_sum|_count)?\b(?![_a-z]))")

#: The names of all metrics, of those without a sample yet too.
FAMILIES = {family.name for family in Metrics().registry.collect()}


class Panel(NamedTuple):
    """A query of a panel, as Prometheus gets it."""

    title: str
    query: str


def panels() -> list[Panel]:
    values = {"$instance": ".*", "$__rate_interval": "10m", "$__interval": "10m"}

    def filled(expression: str) -> str:
        for name, value in values.items():
            expression = expression.replace(name, value)
        assert "$" not in expression
        return expression

    dashboard = json.loads(DASHBOARD.read_text())
    shown = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    found = [Panel(panel["title"], filled(target["expr"])) for panel in shown for target in panel["targets"]]
    annotations = [Panel(each["name"], filled(each["expr"])) for each in dashboard["annotations"]["list"]]
    assert len(shown) > 20
    return found + annotations


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningExplorer]:
    """An explorer that has served, was rated, has a trainer, and an open alarm."""
    with engine_place() as place:
        double = place.fresh()
        with explorer_running(settings_for(tmp_path_factory.mktemp("explorer"), [double.url])) as running:
            running.ledger.training.take_epoch("host:1")
            running.feedback(running.chat().json()["id"])
            running.ledger.alarms.raise_alarm(Alarm("entropy", "it fell"))
            eventually(lambda: running.metrics().get("tuneloop_alarm") == 1)
            eventually(lambda: running.metrics().get("tuneloop_version_reward") == 1)
            yield running


@pytest.fixture(scope="module")
def prometheus(explorer: RunningExplorer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPrometheus]:
    folder = tmp_path_factory.mktemp("prometheus") / "run"
    with prometheus_running(folder, explorer.url.removeprefix("http://")) as running:
        eventually(lambda: (running.value("count_over_time(up[10m])") or 0) >= 2)
        explorer.feedback(explorer.chat().json()["id"])
        eventually(lambda: (running.value("sum(increase(tuneloop_requests_total[10m]))") or 0) > 0)
        yield running


def test_metrics_are_named_as_prometheus_wants_it(explorer: RunningExplorer) -> None:
    done = promtool("check", "metrics", text=explorer.http.get("/metrics").text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_names_against_the_conventions_would_be_found(explorer: RunningExplorer) -> None:
    wrong = "# HELP tuneloop_waitingMillis How long\n# TYPE tuneloop_waitingMillis counter\ntuneloop_waitingMillis 1\n"
    said = promtool("check", "metrics", text=wrong)
    assert said.returncode != 0
    assert "_total" in said.stderr


def test_promtool_takes_the_settings_and_the_rules(tmp_path: Path) -> None:
    settings = (FOLDER / "prometheus.yml").read_text()
    (tmp_path / "key").write_text("tl-key")
    (tmp_path / "prometheus.yml").write_text(settings.replace("/run/secrets/tuneloop_metrics_key", f"{tmp_path}/key"))
    (tmp_path / "alerts.yml").write_text((FOLDER / "alerts.yml").read_text())
    done = promtool("check", "config", "prometheus.yml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


def test_each_alert_fires_and_does_not_fire() -> None:
    done = promtool("test", "rules", "alerts.test.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    tests = yaml.safe_load((FOLDER / "alerts.test.yml").read_text())["tests"]
    tried = {(test["alertname"], bool(test["exp_alerts"])) for each in tests for test in each["alert_rule_test"]}
    assert tried == {(name, fires) for name in NAMES for fires in (True, False)}


def test_a_rule_that_is_wrong_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "alerts.test.yml").write_text((FOLDER / "alerts.test.yml").read_text())
    wrong = (FOLDER / "alerts.yml").read_text().replace("tuneloop_database_up == 0", "tuneloop_database_up > 0")
    (tmp_path / "alerts.yml").write_text(wrong)
    done = promtool("test", "rules", "alerts.test.yml", folder=tmp_path)
    assert done.returncode != 0
    assert "TuneloopDatabaseDown" in done.stdout + done.stderr


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_each_alert_has_its_runbook(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^### (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert page == "docs/troubleshooting.md"
    assert anchor == rule["alert"].lower()
    assert rule["alert"] in headings


def test_each_runbook_has_its_alert() -> None:
    text = part_below((ROOT / "docs" / "troubleshooting.md").read_text(), "Runbooks")
    assert re.findall(r"^### (.+)$", text, re.MULTILINE) == NAMES


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel.title)
def test_each_panel_shows_what_there_is(panel: Panel, prometheus: RunningPrometheus) -> None:
    """A panel may be empty only where Prometheus has no sample of any metric that it asks for."""
    named = set(_METRIC.findall(panel.query))
    assert named <= FAMILIES
    have = [name for name in named if prometheus.query(f'last_over_time({{__name__=~"{name}(_total|_bucket)?"}}[10m])')]
    if panel.title == "Decisions":  # an annotation for each one, of which there is none yet
        assert prometheus.query(panel.query) == []
    else:
        # A scrape may fail where much else is running: then there is nothing at this instant.
        eventually(lambda: bool(prometheus.query(panel.query)) == bool(have))


def test_few_panels_are_empty(prometheus: RunningPrometheus) -> None:
    asked = [panel.query for panel in panels()]
    empty = {query.partition("tuneloop_")[2].split("{")[0] for query in asked if not prometheus.query(query)}
    assert empty <= {"purged_total", "redacted_total", "access_refused_total", "raters", "version_decisions_total"}


def test_alerts_are_those_of_the_service(explorer: RunningExplorer, prometheus: RunningPrometheus) -> None:
    def firing() -> list[str]:
        return [each["annotations"]["summary"] for each in prometheus.alerts() if each["state"] == "firing"]

    eventually(lambda: "the alarm entropy is open" in firing())
    assert len(firing()) == 1


def test_each_alert_asks_for_metrics_that_there_are() -> None:
    named = {name for rule in RULES for name in _METRIC.findall(rule["expr"])}
    assert named <= FAMILIES
    assert len(named) >= 18


@pytest.mark.xdist_group("workers")
def test_while_workers_and_the_engine_die_scrapes_succeed_counters_stay_and_the_alert_fires(tmp_path: Path) -> None:
    with ExitStack() as stack:
        double = stack.enter_context(engine_place()).fresh()
        (tmp_path / "explorer").mkdir()
        staff = stack.enter_context(hired(tmp_path / "explorer", double))
        target = staff.http.base_url.netloc.decode()
        scraped = stack.enter_context(prometheus_running(tmp_path / "prometheus", target, patience="2s"))

        def answered() -> float:
            return scraped.value('sum(tuneloop_requests_total{status="200"})') or 0

        for dead in (1, 2):
            for _ in range(20):
                with httpx.Client(base_url=staff.http.base_url, timeout=30) as client:
                    chat(client)
            eventually(lambda dead=dead: answered() >= 20 * dead)
            victim = staff.pids()[0]
            os.kill(victim, signal.SIGKILL)
            eventually(lambda victim=victim: victim not in (pids := staff.pids()) and len(pids) == 2)
        assert "no engine answers" not in _summaries(scraped)
        double.dead = True
        eventually(lambda: "no engine answers" in _summaries(scraped), within_s=120)
        assert answered() >= 40
        assert scraped.value("min_over_time(up[10m])") == 1, scraped.query("up[10m]")
        counters = {each["metric"]["__name__"] for each in scraped.query('{__name__=~"tuneloop_.*_total"}')}
        assert len(counters) > 10
        assert [name for name in counters if scraped.value(f"sum(resets({name}[10m]))") != 0] == []
        double.dead = False
        eventually(lambda: "no engine answers" not in _summaries(scraped), within_s=120)


def _summaries(prometheus: RunningPrometheus) -> set[str]:
    return {each["annotations"]["summary"] for each in prometheus.alerts() if each["state"] == "firing"}


def test_causes_fire_their_alerts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doubles: list[EngineDouble], running_explorer: Run
) -> None:
    monkeypatch.setattr(diagnosis, "VERSION_WAITS_S", 1.0)
    explorer, [first, second] = running_explorer(*doubles, max_in_flight=1), doubles
    with firing(tmp_path, explorer) as fire, ExitStack() as stack:
        fire("TuneloopTrainerDown")
        explorer.ledger.recording.refuses = lambda record: getattr(record, "task_id", None) == "poison"
        explorer.chat(metadata={"task_id": "poison"})
        LOG.count_dropped()
        fire("TuneloopRecordsRefused", "TuneloopLogDropped", "TuneloopAlarm")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(explorer.ledger.raters, "settle", lambda: 1 / 0)
            fire("TuneloopBackgroundFailures")
        explorer.ledger.recording.away = True
        explorer.chat()
        fire("TuneloopDatabaseDown")
        explorer.ledger.recording.away = False
        explorer.ledger.training.take_epoch("host:1")
        committed(explorer.ledger, 32)
        fire("TuneloopTrainingStalled")
        first.refuses_load_of.add("global_step_1")
        register(explorer.ledger, explorer.settings.job_dir)
        fire("TuneloopVersionRejected")
        first.load_s = 3600.0
        register(explorer.ledger, explorer.settings.job_dir)
        fire("TuneloopVersionNotServed")
        with explorer.ledger.transactions.write() as connection:
            connection.exec_driver_sql("UPDATE versions SET consumed = 7 WHERE version = 1")
        second.fails_at = lambda request: True
        # A series that begins with its last value has no rate.
        fire("TuneloopLedgerImbalance", "TuneloopErrors", meanwhile=explorer.chat)
        second.fails_at, second.hangs = (lambda request: False), True
        pool = stack.enter_context(ThreadPoolExecutor(2))
        for _ in range(2):
            pool.submit(explorer.chat)
        fire("TuneloopRequestsWait")
        second.dead = True
        fire("TuneloopEngineDown")


def test_causes_fire_the_alerts_of_weights_ages_and_what_reads_texts(
    tmp_path: Path, doubles: list[EngineDouble]
) -> None:
    settings = settings_for(tmp_path, [each.url for each in doubles], probe_interval=0.5)
    parts = {
        "judge": section_of(JudgeSettings, {"url": f"http://127.0.0.1:{free_port()}/v1", "model": "j", "retries": 0}),
        "privacy": PrivacySettings(patterns={"evil": r"(x+x+)+y"}),
    }
    first, second = doubles
    with explorer_running(settings.model_copy(update=parts)) as explorer, firing(tmp_path, explorer) as fire:
        until_ready(explorer, 2)
        explorer.chat()
        fire("TuneloopJudgeAway", meanwhile=explorer.chat)
        explorer.chat(messages=[{"role": "user", "content": "x" * 5000}])
        fire("TuneloopPatternTimedOut")
        candidate(explorer)
        eventually(lambda: explorer.ledger.versions.champion().version == 1)
        second.weights = Path("/jobs/global_step_9/actor")
        fire("TuneloopEngineMismatched")
        first.probe_fails = True
        fire("TuneloopEngineNotProven")
        explorer.feedback(explorer.services.feedback.signer.mint("default", 1), reward=1.0)
        fire("TuneloopFeedbackPending")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(explorer.ledger.transactions, "time", lambda: time.time() - 5)
            fire("TuneloopClockSkew")
        now = time.time()
        paces = [
            VersionPace(at=now - age, consumed=8, waiting=waiting, set_aside=0, step_s=1.0, publish_s=0.1)
            for age, waiting in ((60, 0), (1, 24))
        ]
        (explorer.settings.job_dir / "monitor").mkdir(exist_ok=True)
        (explorer.settings.job_dir / "monitor" / "pace.json").write_bytes(msgspec.json.encode(paces))
        fire("TuneloopTrainerLags")
        explorer.ledger.recording.away = True
        explorer.chat()
        fire("TuneloopOutboxOld")


@contextmanager
def firing(tmp_path: Path, explorer: RunningExplorer) -> Iterator[Callable[..., None]]:
    """What waits until alerts of some names fire, and calls something again and again meanwhile."""
    target = explorer.url.removeprefix("http://")
    with prometheus_running(tmp_path / "prometheus", target, patience="1s") as scraped:

        def fire(*names: str, meanwhile: Callable[[], object] = lambda: None) -> None:
            def all_fire() -> bool:
                meanwhile()
                found = {each["labels"]["alertname"] for each in scraped.alerts() if each["state"] == "firing"}
                return found >= set(names)

            eventually(all_fire, within_s=120)

        eventually(lambda: scraped.value("up") == 1)
        yield fire
