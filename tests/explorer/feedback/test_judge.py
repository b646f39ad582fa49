"""The explorer's own judge: what it scores, what becomes of its verdicts, and what it does when it is not there."""

import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.constants import section_of
from tests.doubles.engine import MODEL, EngineDouble
from tests.doubles.judge import JudgeDouble, judge_place, shown, verdict
from tests.explorer.running import RunningExplorer, eventually, explorer_running, open_ledger, settings_for
from tests.explorer.test_main import attached_to, job, service, write_settings
from tests.factories import exchange, experience
from tests.outboxes import records_in
from tuneloop.explorer.engines.fleet import in_share
from tuneloop.explorer.feedback.judge import (
    METRIC,
    SWEEP_S,
    JudgeLoop,
    UnjudgedReply,
    event_id,
    events_of,
    judge_of,
    reading_of,
)
from tuneloop.explorer.metrics import Metrics
from tuneloop.runner import Judge, JudgeFailed, Reply, Rubric
from tuneloop.runner.outbox import Outbox
from tuneloop.shared.errors import EnvironmentRefused, RequestRefused
from tuneloop.shared.experience import Exchange, Feedback
from tuneloop.shared.ledger.recording.judging import JudgedExchange
from tuneloop.shared.settings.feedback import JudgeSettings as JudgeSettings
from tuneloop.shared.settings.feedback import RewardRule
from tuneloop.shared.settings.settings import Settings

pytestmark = pytest.mark.contract

WEIGHTS = {"reward": 1.0, METRIC: 0.5, f"{METRIC}/accuracy": 0.1}

Start = Callable[..., RunningExplorer]


@pytest.fixture(scope="module")
def place() -> Iterator[JudgeDouble]:
    with judge_place() as judge:
        yield judge


@pytest.fixture
def judge(place: JudgeDouble) -> JudgeDouble:
    """The one judge, as new."""
    place.__init__(url=place.url)  # type: ignore[misc]
    return place


def judged_by(settings: Settings, judge: JudgeDouble, **but: Any) -> Settings:
    by = section_of(JudgeSettings, {"url": judge.base_url, "model": "j", "retries": 0} | but)
    return settings.model_copy(update={"judge": by, "reward": RewardRule(weights=WEIGHTS, clip=None)})


@pytest.fixture
def settings(tmp_path: Path, double: EngineDouble) -> Settings:
    return settings_for(tmp_path, [double.url])


def counted(explorer: RunningExplorer) -> Counter[str]:
    """Replies given to the judge, by outcome."""
    lines = [line for line in explorer.http.get("/metrics").text.splitlines() if line.startswith("tuneloop_judged_tot")]
    return Counter({line.split('"')[1]: int(float(line.split()[-1])) for line in lines})


def until(explorer: RunningExplorer, **outcomes: int) -> None:
    eventually(lambda: all(counted(explorer)[name] >= count for name, count in outcomes.items()), within_s=20)


def verdicts(explorer: RunningExplorer) -> Sequence[Any]:
    return explorer.rows(
        f"SELECT msg_id, choice, value, source FROM feedback WHERE metric = '{METRIC}' ORDER BY msg_id, choice"
    )


def test_every_reply_is_judged_and_its_verdict_is_feedback(settings: Settings, judge: JudgeDouble) -> None:
    judge.says = [verdict(5, 3, 1, reason="half of it")]
    with explorer_running(judged_by(settings, judge)) as explorer:
        said = explorer.chat(n=2).json()["id"]
        explorer.feedback(f"{said}:0", reward=1.0, source="ann")
        until(explorer, judged=2)
        eventually(lambda: len(verdicts(explorer)) == 2)
        assert verdicts(explorer) == [(said, choice, 0.5, "judge:j") for choice in (0, 1)]
        metrics = explorer.rows("SELECT DISTINCT metric FROM feedback WHERE source = 'judge:j' ORDER BY metric")
        assert [row[0] for row in metrics] == [
            "comment",
            "judge",
            "judge/accuracy",
            "judge/completeness",
            "judge/relevance",
        ]
        assert explorer.rows("SELECT DISTINCT text FROM feedback WHERE metric = 'comment'") == [("half of it",)]
        rewards = explorer.rows("SELECT reward FROM experiences ORDER BY choice")
        assert [row[0] for row in rewards] == [pytest.approx(1.0 + 0.25 + 0.05), pytest.approx(0.25 + 0.05)]
        assert explorer.metrics()["tuneloop_judge_tokens_total"] == 2 * 110
        assert explorer.metrics()["tuneloop_judge_seconds_count"] == 2
        assert "3+4=" in shown(judge.requests[0])
        assert explorer.commit().json()["committed"] == 2


def test_nobody_speaks_in_the_name_of_the_judge(settings: Settings, judge: JudgeDouble) -> None:
    """Its verdicts are taken for true."""
    with explorer_running(judged_by(settings, judge)) as explorer:
        said = explorer.chat().json()["id"]
        refused = explorer.feedback(said, reward=1.0, source="judge:j")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "source_of_judge")
        token = explorer.http.post("/v1/feedback_tokens", json={"msg_id": said, "source": "judge:j"}).json()["token"]
        bearer = {"Authorization": f"Bearer {token}"}
        refused = explorer.http.post("/feedback", json={"msg_ids": [said], "value": 1.0}, headers=bearer)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "source_of_judge")
        explorer.feedback(said, reward=1.0, source="judge:k")
        eventually(lambda: len(verdicts(explorer)) == 1)
        others = explorer.rows("SELECT DISTINCT source FROM feedback WHERE metric = 'reward'")
        assert [row[0] for row in others] == ["judge:k"]


def test_a_restart_judges_nothing_twice(settings: Settings, judge: JudgeDouble) -> None:
    settings = judged_by(settings, judge)
    with explorer_running(settings) as explorer:
        explorer.chat()
        until(explorer, judged=1)
    with explorer_running(settings) as explorer:
        explorer.chat()
        until(explorer, judged=1)
        eventually(lambda: len(verdicts(explorer)) == 2)
    assert len(judge.requests) == 2


def test_a_verdict_on_disk_is_not_asked_for_again_though_the_database_lacks_it(
    settings: Settings, judge: JudgeDouble
) -> None:
    settings = judged_by(settings, judge)
    with explorer_running(settings) as explorer:
        explorer.chat()
        explorer.until_flushed()
        judge.pause_s = 0.3
        eventually(lambda: len(judge.requests) == 1)
        explorer.ledger.recording.away = True
        until(explorer, judged=1)
    with explorer_running(settings) as explorer:
        eventually(lambda: len(verdicts(explorer)) == 1)
        explorer.chat()
        until(explorer, judged=1)
    assert len(judge.requests) == 2


def test_people_have_the_first_word_where_only_the_unrewarded_are_judged(
    settings: Settings, judge: JudgeDouble
) -> None:
    with explorer_running(judged_by(settings, judge, which="unrewarded", after=5)) as explorer:
        rewarded, silent = (explorer.chat().json()["id"] for _ in range(2))
        explorer.feedback(rewarded)
        explorer.until_flushed()
        assert judge.requests == []
        until(explorer, judged=1)
        later = explorer.chat().json()["id"]
        until(explorer, judged=2)
        eventually(lambda: len(verdicts(explorer)) == 2)
        assert {row[0] for row in verdicts(explorer)} == {silent, later}


def test_what_is_not_stored_or_cannot_be_trained_on_or_is_old_or_of_the_future_is_not_judged(
    settings: Settings, judge: JudgeDouble
) -> None:
    ledger = open_ledger(settings)
    ledger.recording.record([exchange(received_at=1.0)])
    ledger.close()
    with explorer_running(judged_by(settings, judge)) as explorer:
        explorer.chat(store=False)
        cut_off = experience(drop_reason="cut_off", finish_reason=None)
        explorer.ledger.recording.record([exchange(received_at=time.time(), experiences=(cut_off,))])
        explorer.ledger.recording.record([exchange(received_at=time.time() + 1e6)])
        kept = explorer.chat().json()["id"]
        until(explorer, judged=1)
        eventually(lambda: [row[0] for row in verdicts(explorer)] == [kept])
    assert len(judge.requests) == 1


def test_a_share_is_the_same_replies_each_time() -> None:
    ids = [f"chatcmpl-{number}" for number in range(2000)]
    few, many = ({each for each in ids if in_share(b"judged", each, share)} for share in (0.1, 0.5))
    assert 130 < len(few) < 270
    assert 900 < len(many) < 1100
    assert few < many
    assert all(in_share(b"judged", each, 1.0) for each in ids)


def test_one_reply_without_a_verdict_does_not_hold_up_the_others(settings: Settings, judge: JudgeDouble) -> None:
    judge.says = ["I cannot say.", verdict(9), verdict(4)]
    with explorer_running(judged_by(settings, judge, concurrency=1)) as explorer:
        said = [explorer.chat().json()["id"] for _ in range(3)]
        until(explorer, failed=2, judged=1)
        eventually(lambda: len(verdicts(explorer)) == 1)
        explorer.chat()
        until(explorer, failed=2, judged=2)
        assert counted(explorer) == {"failed": 2, "judged": 2, "away": 0, "not_kept": 0}
        assert said[0] not in {row[0] for row in verdicts(explorer)}
        assert explorer.failures == []


def test_a_judge_that_is_away_is_asked_again_and_nothing_is_left_out(settings: Settings, judge: JudgeDouble) -> None:
    judge.answers = [(503, {}, {}), (401, {"error": "no key"}, {})]
    with explorer_running(judged_by(settings, judge)) as explorer:
        said = explorer.chat().json()["id"]
        until(explorer, away=2, judged=1)
        eventually(lambda: [row[0] for row in verdicts(explorer)] == [said])
        assert explorer.chat().status_code == 200
        until(explorer, judged=2)
    assert len(judge.requests) == 4


def test_who_judges_slowly_keeps_no_request_waiting(settings: Settings, judge: JudgeDouble) -> None:
    judge.pause_s = 4.0
    with explorer_running(judged_by(settings, judge)) as explorer:
        explorer.chat()
        eventually(lambda: len(judge.requests) == 1)
        assert explorer.chat().elapsed.total_seconds() < 3
        assert len(judge.at_once) == 1


def test_no_more_are_asked_at_once_than_the_settings_say(settings: Settings, judge: JudgeDouble) -> None:
    judge.pause_s = 0.1
    with explorer_running(judged_by(settings, judge, concurrency=2, after=0.5)) as explorer:
        for _ in range(6):
            explorer.chat()
        until(explorer, judged=6)
    assert judge.most_at_once == 2


def test_no_client_names_a_judge_of_its_own(settings: Settings, judge: JudgeDouble) -> None:
    """Nor a teacher: where either is asked for, only the settings say."""
    with judge_place() as theirs, explorer_running(judged_by(settings, judge)) as explorer:
        theirs_too = {"judge": {"url": theirs.base_url, "model": "j"}, "teacher_url": theirs.base_url}
        flat = {"judge": theirs.base_url, "judge.url": theirs.base_url, "teacher_url": theirs.base_url}
        said = explorer.chat(**theirs_too, metadata=flat).json()["id"]
        until(explorer, judged=1)
        explorer.feedback(said, **theirs_too)
        explorer.commit(**theirs_too)
        explorer.chat()
        until(explorer, judged=2)
        assert (len(judge.requests), theirs.requests) == (2, [])


def test_an_explorer_that_judges_through_itself_does_not_train_on_that(explorer: RunningExplorer) -> None:
    itself = Judge(base_url=f"{explorer.url}/v1", model=MODEL, retries=0)
    with pytest.raises(JudgeFailed):  # the engine double is no judge
        itself.score(Reply(text="7"))
    itself.close()
    explorer.chat()
    assert sum(explorer.counts().values()) == 1


def test_the_service_judges_in_its_control_process(tmp_path: Path, double: EngineDouble, judge: JudgeDouble) -> None:
    by = {"judge": {"url": judge.base_url, "model": "j", "key": "secret"}}
    rule = {"reward": {"weights": {"judge": 1.0}}}
    file = write_settings(tmp_path, explorer__service_status_check_interval=0.2, **attached_to(double), **by, **rule)
    with service(file) as (process, http):
        http.post("/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "3+4="}]})
        eventually(lambda: 'tuneloop_judged_total{outcome="judged"} 1.0' in http.get("/metrics").text)
        eventually(lambda: http.post("/commit", json={}).json()["committed"] == 1)
        assert process.poll() is None
    assert judge.headers[0]["authorization"] == "Bearer secret"
    assert (job(tmp_path) / "outbox").is_dir()


class Bench:
    """Judging by itself: what runs beside it stands still, and the test does it by hand."""

    def __init__(self, folder: Path, judge: JudgeDouble) -> None:
        settings = settings_for(folder)
        self.ledger = open_ledger(settings)
        self.outbox = Outbox(settings.outbox_dir, 1 << 20)
        self.all_there = True
        self.judging = JudgeLoop(
            section_of(JudgeSettings, {"url": judge.base_url, "model": "j", "retries": 0}),
            self.ledger,
            self.outbox,
            metrics=Metrics(),
            conversation=no_conversation,
            wait_until_taken=self.wait_until_taken,
        )

    async def wait_until_taken(self, timeout_s: float) -> bool:
        return self.all_there

    def chat(self) -> Exchange:
        request = json.dumps({"messages": [USER]}).encode()
        said = exchange(request=request, received_at=time.time())
        self.ledger.recording.record([said])
        return said

    def flush(self) -> list[Feedback]:
        events = records_in(self.outbox.folder)
        self.ledger.recording.record(events)
        return [event for event in events if isinstance(event, Feedback)]

    def sweep(self) -> None:
        self.judging._sweep_at = 0.0


@pytest.fixture
async def bench(tmp_path: Path, judge: JudgeDouble) -> AsyncIterator[Bench]:
    found = Bench(tmp_path, judge)
    yield found
    await found.judging._judge.close_async()
    found.outbox.close()
    found.ledger.close()


async def test_verdicts_on_their_way_to_the_database_are_not_asked_for_again(bench: Bench, judge: JudgeDouble) -> None:
    bench.chat()
    for _ in range(3):
        await bench.judging.look()
    assert len(judge.requests) == 1
    bench.all_there = False
    bench.sweep()
    assert await bench.judging.look() > 0
    assert len(judge.requests) == 1
    bench.flush()
    bench.all_there = True
    for _ in range(3):
        await bench.judging.look()
    assert len(judge.requests) == 1


async def test_a_row_that_was_shown_late_is_found_by_the_next_sweep(bench: Bench, judge: JudgeDouble) -> None:
    await bench.judging.look()
    bench.judging._last = 100
    bench.chat()
    await bench.judging.look()
    assert judge.requests == []
    bench.sweep()
    await bench.judging.look()
    assert len(judge.requests) == 1


async def test_a_judge_that_stays_away_is_asked_ever_more_seldom_and_one_reply_at_a_time(
    bench: Bench, judge: JudgeDouble
) -> None:
    for _ in range(3):
        bench.chat()
    judge.answers = [(503, {}, {})] * (3 + 10)
    pauses = [await bench.judging.look() for _ in range(11)]
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert len(judge.requests) == 13
    while await bench.judging.look():
        pass
    assert len(judge.requests) == 16
    judge.answers = [(429, {}, {"retry-after": "120"})]
    bench.chat()
    assert await bench.judging.look() == 120
    judge.answers = [(429, {}, {"retry-after": "99999999999"})]
    assert await bench.judging.look() == SWEEP_S


async def test_those_judged_are_not_asked_for_again_with_those_that_must_wait(bench: Bench, judge: JudgeDouble) -> None:
    for _ in range(3):
        bench.chat()
    judge.answers = [(503, {}, {})]
    assert await bench.judging.look() == 1
    assert len(judge.requests) == 3
    while await bench.judging.look():
        pass
    assert len(judge.requests) == 4
    assert len([each for each in bench.flush() if each.metric == METRIC]) == 3


async def test_two_verdicts_on_one_reply_are_one(bench: Bench, judge: JudgeDouble) -> None:
    """As two explorers would ask for."""
    said, [reply] = bench.chat(), bench.ledger.judging.replies_after(0, limit=9)
    for score in (5, 1):
        judge.says = [verdict(score)]
        found = await bench.judging._judge.score_async(Reply(text=""))
        bench.ledger.recording.record(events_of("judge:j", UnjudgedReply(reply, ""), found))
    ids = [event_id("judge:j", reply, metric) for metric in (METRIC, f"{METRIC}/accuracy", "comment", "other")]
    assert bench.ledger.judging.existing_events(ids) == set(ids[:3])
    with bench.ledger.transactions.write() as connection:
        values = connection.exec_driver_sql(f"SELECT value FROM feedback WHERE metric = '{METRIC}'").all()
    assert [tuple(row) for row in values] == [(1.0,)]
    assert said.msg_id == reply.msg_id


def said(endpoint: str, body: Any, **but: Any) -> JudgedExchange:
    request = body if isinstance(body, bytes) else json.dumps(body).encode()
    return JudgedExchange(
        **{"endpoint": endpoint, "request": request, "choice": 0, "text": "4", "tool_calls": None} | but
    )


async def no_conversation(_: str, __: str) -> Sequence[dict[str, Any]]:
    raise RequestRefused("gone", status=404)


async def a_conversation(_: str, __: str) -> Sequence[dict[str, Any]]:
    return [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]


USER = {"role": "user", "content": "2+2"}


@pytest.mark.parametrize(
    ("endpoint", "body", "messages"),
    [
        ("/v1/chat/completions", {"messages": [USER]}, [USER]),
        ("/v1/completions", {"prompt": "2+2="}, [{"role": "prompt", "content": "2+2="}]),
        ("/v1/completions", {"prompt": ["x", "2+2="], "n": 2}, [{"role": "prompt", "content": "2+2="}]),
        ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": [USER]}, [USER]),
        ("/v1/responses", {"input": "2+2"}, [USER]),
        (
            "/v1/responses",
            {"input": "2+2", "previous_response_id": "resp_x"},
            [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}, USER],
        ),
    ],
)
async def test_replies_of_every_endpoint_are_read(endpoint: str, body: Any, messages: Any) -> None:
    reply = await reading_of(said(endpoint, body, choice=3), "default", a_conversation)
    assert [{"role": each["role"], "content": each["content"]} for each in reply.messages] == messages
    assert reply.text == "4"


async def test_tools_are_read() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    calls = json.dumps([{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]).encode()
    reply = await reading_of(
        said("/v1/chat/completions", {"messages": [USER], "tools": tools}, tool_calls=calls), "default", no_conversation
    )
    assert (reply.tools, reply.tool_calls[0].arguments) == (("add",), {"a": 2})


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", b"{"),
        ("/v1/chat/completions", b"[]"),
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"messages": [5]}),
        ("/v1/chat/completions", {"messages": [USER], "tools": 5}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/completions", {"prompt": [[1], [2]]}),
        ("/v1/completions", {"prompt": ["x"], "n": 1}),
        ("/v1/messages", {"messages": 5}),
        ("/v1/responses", {"input": 5}),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_x"}),
        ("/v1/responses", b"[" * 100_000),
    ],
)
async def test_what_cannot_be_read_is_an_error_of_that_reply(endpoint: str, body: Any) -> None:
    with pytest.raises(RequestRefused):
        await reading_of(said(endpoint, body, choice=3), "default", no_conversation)


def test_a_rubric_of_a_file_is_judged_by(tmp_path: Path) -> None:
    file = tmp_path / "rubric.json"
    Rubric(criteria={"tone": "Is it friendly?"}, scale=(0, 10)).save(file)
    found = judge_of(JudgeSettings(url="http://localhost/v1", model="j", rubric=file))
    assert (found.rubric.criteria, found.rubric.scale) == ({"tone": "Is it friendly?"}, (0, 10))


@pytest.mark.parametrize("text", [None, "{}"])
def test_a_rubric_that_cannot_be_read_is_told_at_the_start(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "rubric.json").write_text(text)
    with pytest.raises(EnvironmentRefused, match=r"judge\.rubric: .*rubric\.json"):
        judge_of(JudgeSettings(url="http://localhost/v1", model="j", rubric=tmp_path / "rubric.json"))


def test_a_key_that_no_header_can_hold_is_told_at_the_start() -> None:
    with pytest.raises(EnvironmentRefused, match="judge: "):
        judge_of(JudgeSettings(url="http://localhost/v1", model="j", key="schlüssel"))


def test_verdicts_that_would_come_too_late_are_refused() -> None:
    by = {"url": "http://localhost/v1", "model": "j", "after": 60}
    values = {"model": {"model_path": "m"}, "judge": by, "reward": {"attribution_window": 60}}
    with pytest.raises(ValueError, match=r"judge\.after: .* too late"):
        Settings.model_validate(values)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"url": "http://localhost/v1"}, "judge.model: needed"),
        ({"after": 86400.0}, "judge.after"),
        ({"model": "x" * 300}, "judge.model: is too long"),
        ({"criteria": {}}, "1 to 20"),
        ({"criteria": {"a b": "x"}}, "the name 'a b'"),
        ({"criteria": {"a": " "}}, "a needs a description"),
    ],
)
def test_settings_that_do_not_fit_are_refused(wrong: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Settings.model_validate({"model": {"model_path": "m"}, "judge": wrong})
