"""The admin API: its key, its reports, its decisions, and how the explorer carries them out."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.doubles.engine import EngineDouble
from tests.explorer.checkpoints import register
from tests.explorer.conftest import Run
from tests.explorer.running import RunningExplorer, eventually
from tests.factories import exchange, feedback
from tuneloop.shared.errors import SettingsError
from tuneloop.shared.ledger.ledger import Alarm, Ledger
from tuneloop.shared.settings.loader import load_settings

KEY = "a-key-that-nobody-guesses"


class Admin:
    """Somebody with the key to an explorer."""

    def __init__(self, explorer: RunningExplorer, key: str = KEY) -> None:
        self._http, self._headers = explorer.http, {"Authorization": f"Bearer {key}"}

    def get(self, path: str = "", **query: Any) -> httpx.Response:
        return self._http.get(f"/admin/versions{path}", params=query, headers=self._headers)

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self._http.post(f"/admin/versions{path}", json=body, headers=self._headers)


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    """The status, the code and the sentence."""
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return answer.status_code, error["code"], error["message"]


@pytest.fixture
def explorer(running_explorer: Run, double: EngineDouble) -> RunningExplorer:
    """An explorer with an admin key, which serves version 1."""
    explorer = running_explorer(double, admin_key=KEY)
    register(explorer.ledger, explorer.settings.job_dir)
    eventually(lambda: explorer.ledger.versions.champion().version == 1)
    return explorer


def states(ledger: Ledger) -> list[str]:
    return [f"{each.state}{' pinned' if each.pinned else ''}" for each in ledger.versions.all()]


def test_without_a_key_there_is_no_admin_api(running_explorer: Run, double: EngineDouble) -> None:
    explorer = running_explorer(double)
    for path in ("", "/0", "/events", "/compare"):
        assert refusal(Admin(explorer).get(path)) == (404, "not_found", f"no route /admin/versions{path}")
    assert refusal(Admin(explorer).post("/0/promote")) == (404, "not_found", "no route /admin/versions/0/promote")


def test_only_those_with_the_key_are_heard(explorer: RunningExplorer) -> None:
    for headers in (
        {},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": KEY},
        {"Authorization": "Bearer clé".encode()},
    ):
        for method, path in (("GET", ""), ("GET", "/0"), ("POST", "/0/promote"), ("POST", "/unpin")):
            answer = explorer.http.request(method, f"/admin/versions{path}", headers=headers)
            assert refusal(answer)[:2] == (401, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
    assert states(explorer.ledger) == ["retired", "champion"]
    assert Admin(explorer).get().status_code == 200


def test_a_key_that_is_easily_guessed_is_refused_and_not_told(tmp_path: Any) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("model: {model_path: m}\nexplorer: {admin_key: hush hush}\n")
    with pytest.raises(SettingsError, match=r"explorer\.admin_key: must have at least 16 characters") as refused:
        load_settings(file)
    assert "hush" not in str(refused.value)


def test_what_is_known_of_the_versions_is_told(explorer: RunningExplorer) -> None:
    admin = Admin(explorer)
    explorer.feedback(explorer.chat().json()["id"], reward=0.5)
    explorer.until_flushed()
    answer = admin.get().json()
    assert answer["object"] == "list"
    assert [(row["version"], row["state"], row["mean_reward"]) for row in answer["data"]] == [
        (1, "champion", 0.5),
        (0, "retired", 1.0),
    ]
    one = admin.get("/1").json()
    assert (one["version"]["trained_on"], one["parent"], one["trained_on_replies_of"]) == (1, 0, {"0": 1})
    assert [event["action"] for event in one["events"]] == ["published", "promoted"]
    assert [event["version"] for event in admin.get("/events", last=2).json()["data"]] == [0, 1]
    assert {event["version"] for event in admin.get("/events", version=1).json()["data"]} == {1}
    compared = admin.get("/compare", a=0, b=1).json()
    assert (compared["b"]["reward"]["mean"], compared["interval"]) == (0.5, None)


def test_decisions_reach_the_engines(explorer: RunningExplorer) -> None:
    admin = Admin(explorer)
    answer = admin.post("/0/promote", {"reason": "as it was", "expect": 1, "by": "ann"})
    assert answer.json() == {"version": 0, "champion": 0, "taken_up_within_s": 0.1}
    eventually(lambda: explorer.version() == 0)
    assert admin.post("/1/pin").json()["champion"] == 1
    eventually(lambda: explorer.version() == 1)
    assert admin.post("/unpin", {}).json()["version"] == 1
    assert admin.post("/rollback", {"reason": "it swears"}).json()["champion"] == 0
    eventually(lambda: explorer.version() == 0)
    assert states(explorer.ledger) == ["champion", "rolled_back"]
    events = [event for event in explorer.ledger.versions.events() if event.actor.startswith("admin")]
    assert {event.actor for event in events} == {"admin:ann", "admin:api"}
    assert events[0].reason == "version 0 took its place"


def test_what_cannot_be_is_refused_and_changes_nothing(explorer: RunningExplorer) -> None:
    admin, before = Admin(explorer), states(explorer.ledger)
    reason = {"reason": "x"}
    for number in ("7", "x", "1.5", "-1", "9" * 5000):
        for answer in (admin.get(f"/{number}"), admin.post(f"/{number}/promote"), admin.post(f"/{number}/pin")):
            assert refusal(answer)[:2] == (404, "version_not_found")
    assert refusal(admin.post("/7/rollback", reason)) == (404, "version_not_found", "there is no version 7")
    assert refusal(admin.get("/compare", a=0, b=7)) == (404, "version_not_found", "there is no version 7")
    assert refusal(admin.get("/compare", a=0)) == (400, "invalid_type", "b must be a number")
    assert refusal(admin.get("/events", last=0))[:2] == (400, "out_of_range")
    assert refusal(admin.post("/0/promote", {"expect": 0})) == (
        409,
        "version_refused",
        "version 1 is the champion, not version 0: look again, then decide",
    )
    assert refusal(admin.post("/0/rollback", reason))[:2] == (409, "version_refused")
    assert refusal(admin.post("/unpin")) == (409, "version_refused", "no version is pinned")
    assert refusal(admin.post("/1/rollback"))[:2] == (400, "missing_required_parameter")
    assert refusal(admin.post("/rollback", {"reason": " "}))[:2] == (400, "missing_required_parameter")
    for body, code in (
        ({"expect": "1"}, "invalid_type"),
        ({"expect": True}, "invalid_type"),
        ({"expect": 10**30}, "invalid_type"),
        ({"reason": 3}, "invalid_type"),
        ({"reason": "x" * 2001}, "too_long"),
        ({"by": "x" * 300}, "too_long"),
        ({"by": "ann\x1b[2J"}, "invalid_value"),
        ({"reason": "fine\n9  champion by ann"}, "invalid_value"),
        ({"reason": "\u202eenif"}, "invalid_value"),
        ({"expct": 1}, "unknown_parameter"),
        ([], "invalid_type"),
    ):
        assert refusal(admin.post("/0/promote", body))[:2] == (400, code)
    assert states(explorer.ledger) == before


def test_what_must_not_be_served_is_neither_promoted_nor_pinned(explorer: RunningExplorer) -> None:
    admin = Admin(explorer)
    explorer.ledger.alarms.raise_alarm(
        Alarm("length", "replies got long", holds=True)
    )  # else the explorer would take it up
    register(explorer.ledger, explorer.settings.job_dir)
    assert refusal(admin.post("/2/reject"))[:2] == (400, "missing_required_parameter")
    assert admin.post("/2/reject", {"reason": "NaN in lm_head"}).json()["champion"] == 1
    assert refusal(admin.post("/1/reject", {"reason": "x"}))[:2] == (409, "version_refused")
    assert refusal(admin.post("/7/reject", {"reason": "x"}))[:2] == (404, "version_not_found")
    assert admin.post("/1/rollback", {"reason": "it swears"}).json()["champion"] == 0
    before = states(explorer.ledger)
    for version, answer in ((1, "version 1 is rolled_back: it swears"), (2, "version 2 is rejected: NaN in lm_head")):
        for decision in ("promote", "pin"):
            assert refusal(admin.post(f"/{version}/{decision}")) == (409, "version_refused", answer)
    assert states(explorer.ledger) == before == ["champion", "rolled_back", "rejected"]


def test_of_two_at_once_the_second_is_told_so(explorer: RunningExplorer) -> None:
    explorer.ledger.alarms.raise_alarm(Alarm("length", "replies got long", holds=True))
    register(explorer.ledger, explorer.settings.job_dir)
    request = [("/0/promote", "ann"), ("/2/promote", "bert")]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda each: Admin(explorer).post(each[0], {"expect": 1, "by": each[1]}), request))
    assert sorted(each.status_code for each in answers) == [200, 409]
    first, second = sorted(answers, key=lambda each: each.status_code)
    champion = first.json()["champion"]
    assert refusal(second)[1:] == (
        "version_refused",
        f"version {champion} is the champion, not version 1: look again, then decide",
    )
    assert explorer.ledger.versions.champion().version == champion


def test_a_pinned_version_is_not_replaced(explorer: RunningExplorer) -> None:
    admin = Admin(explorer)
    assert admin.post("/1/pin", {"expect": 1}).status_code == 200
    assert refusal(admin.post("/0/promote")) == (409, "version_refused", "version 1 is pinned; unpin it first")
    assert states(explorer.ledger) == ["retired", "champion pinned"]


def test_raters_are_listed_for_who_has_the_key(explorer: RunningExplorer) -> None:
    said = exchange(tenant="default")
    explorer.ledger.recording.record([said, feedback(msg_id=said.msg_id, tenant="default", source="ann")])
    explorer.ledger.raters.quarantine("default", "ann", by="eve", reason="she lies")
    assert explorer.http.get("/admin/raters").status_code == 401
    [rater, *_] = explorer.http.get("/admin/raters", headers={"Authorization": f"Bearer {KEY}"}).json()["data"]
    assert (rater["name"], rater["state"], rater["events"], rater["reason"]) == ("ann", "quarantined", 1, "she lies")
