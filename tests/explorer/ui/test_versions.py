"""The pages of versions: what they show, and what is decided on them."""

from collections.abc import Iterator

import pytest

from tests.explorer.running import eventually
from tests.explorer.ui.conftest import Filled, filled_running
from tests.explorer.ui.filled import VERSIONS
from tests.explorer.ui.test_pages import words
from tests.explorer.ui.test_sessions import token_in
from tests.factories import exchange, experience, feedback, trained
from tuneloop.explorer.ui import overview
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Ledger


@pytest.fixture
def deciding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """An explorer of its own: decisions stay."""
    with filled_running(tmp_path_factory.mktemp("deciding")) as found:
        yield found


def decide(filled: Filled, version: int, action: str, status: int = 303, **fields: str) -> str:
    page = filled.text(f"/ui/versions/{version}")
    form = {"token": token_in(page), "expect": str(VERSIONS), "reason": "customers say so"} | fields
    answer = filled.explorer.http.post(f"/ui/versions/{version}/{action}", data=form)
    assert answer.status_code == status, words(answer.text)
    return words(filled.text(answer.headers["location"])) if status == 303 else words(answer.text)


def test_the_list_has_every_version_with_its_figures(filled: Filled):
    page = filled.text("/ui/versions")
    seen = words(page)
    assert all(f'href="/ui/versions/{version}"' in page for version in range(VERSIONS + 1))
    assert "score 0.83 (engine, 64)" in seen
    assert "it earns more: 0.83 against 0.75" in seen


def test_all_that_the_page_says_of_a_version_rests_on_the_same_replies(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "AMONG", 8)
    for version in (trained(ledger), trained(ledger)):
        ledger.versions.promote(version)
        for number in range(12):  # the first four are no longer among the newest
            by = experience(version_min=version, version_max=version)
            told = exchange(user=f"user-{number % 6}", experiences=(by,))
            ledger.recording.record([told, feedback(msg_id=told.msg_id, value=float(number >= 3 + version))])
    shown = overview.build_overview(ledger)
    assert [(each.version, each.mean, each.replies) for each in shown["points"]] == [(1, 1.0, 8), (2, 0.875, 8)]
    assert "8 rewarded replies of version 2 (mean 0.875) and 8 of version 1 (mean 1)" in shown["verdict"].basis


def test_a_version_shows_what_it_was_trained_on_and_why_it_serves(filled: Filled):
    seen = words(filled.text(f"/ui/versions/{VERSIONS}"))
    assert "trained on 32 replies" in seen
    assert "explorer it earns more" in seen
    assert "Promote" not in seen
    assert "Roll back" in seen


def test_two_versions_side_by_side_answer_the_same_prompts(filled: Filled):
    seen = words(filled.text("/ui/versions/compare", a="2", b="6"))
    assert "Hello! Thank you for your message." in seen
    assert "score all engine 0.51 (64) 0.83 (64)" in seen
    assert "of version 6 (mean" in seen
    assert "versions 6 and 5" in words(filled.text("/ui/versions/compare")) or "Version 6 earns" in seen
    assert "Choose two different versions." in words(filled.text("/ui/versions/compare", a="2", b="2"))


@pytest.mark.parametrize("path", ["99", "x", "-1", "1" * 30, "compare?a=99&b=1", "compare?a=x&b=1", "compare?a=1"])
def test_a_version_that_is_not_there_gets_a_sentence(filled: Filled, path: str):
    assert "there is no version" in words(filled.text(f"/ui/versions/{path}", 404))


def test_versions_are_pinned_promoted_and_rolled_back_with_the_reason(deciding: Filled):
    versions = deciding.explorer.ledger.versions
    assert "Version 5 is pinned." in decide(deciding, 5, "pin")
    assert "a version is pinned" not in decide(deciding, 5, "unpin", expect="5")
    assert "Version 6 is the champion now" in decide(deciding, 6, "promote", expect="5")
    assert "Version 6 was rolled back" in decide(deciding, 6, "rollback")
    assert versions.champion().version == 5
    assert versions.get(6).state is VersionState.ROLLED_BACK
    assert {(each.actor, each.reason) for each in versions.events(6)[-1:]} == {("admin:page", "customers say so")}
    eventually(lambda: deciding.explorer.version() == 5)


def test_what_cannot_be_done_gets_a_sentence(filled: Filled):
    assert "Say why" in decide(filled, 6, "rollback", 400, reason=" ")
    assert "version 6 is the champion, not version 3" in decide(filled, 6, "rollback", 409, expect="3")
    assert "only what serves can be rolled back" in decide(filled, 3, "rollback", 409)
    assert "no version is pinned" in decide(filled, 6, "unpin", 409)
    assert "without control characters" in decide(filled, 6, "pin", 400, reason="a\x1bb")
    assert "is not a decision about a version" in decide(filled, 6, "praise", 404)
    assert filled.explorer.ledger.versions.champion().version == VERSIONS


def test_a_decision_without_the_token_is_refused(filled: Filled):
    answer = filled.explorer.http.post("/ui/versions/6/rollback", data={"reason": "x"})
    assert answer.status_code == 403
    assert filled.explorer.ledger.versions.champion().version == VERSIONS


def test_the_first_page_compares_with_the_base_model_where_the_newest_have_no_replies(deciding: Filled):
    """With a version after every step, neither the champion nor the version before it has answered anybody."""
    for version in (VERSIONS + 1, VERSIONS + 2):
        rows = deciding.filler.ledger.recording
        made = [deciding.filler.exchange(VERSIONS) for _ in range(40)]
        rows.record([*made, *(deciding.filler.say(each, value=1.0, choice=0) for each in made)])
        deciding.filler.train(version)
    seen = words(deciding.text("/ui"))
    assert f"Version {VERSIONS} earns 0." in seen
    assert "more than the base model on live reward" in seen
    assert f"version {VERSIONS + 2} serves now, and has too few rewarded replies yet" in seen
