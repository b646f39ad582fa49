from pathlib import Path

import pytest

from tests.factories import trained
from tuneloop.shared.errors import VersionRefused
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Ledger


@pytest.fixture
def made(ledger: Ledger) -> Ledger:
    ledger.versions.ensure_base(Path("/base"))
    for number in (1, 2, 3):
        trained(ledger)
        if number < 3:
            ledger.versions.promote(number)
    return ledger


def states(ledger: Ledger) -> list[str]:
    return [str(version.state) for version in ledger.versions.all()]


def story(ledger: Ledger, version: int) -> list[tuple[str, str, str | None]]:
    return [(str(event.action), event.actor, event.reason) for event in ledger.versions.events(version)]


def test_a_canary_is_a_candidate_that_answers_some_and_may_become_champion(made: Ledger) -> None:
    made.versions.begin_canary(3, by="explorer", reason="a tenth", details={"share": 0.1})
    assert states(made) == ["retired", "retired", "champion", "canary"]
    assert (canary := made.versions.canary()) is not None
    assert canary.version == 3
    assert made.versions.candidate() is None
    made.versions.promote(3, reason="better", details={"p": 0.01})
    assert states(made) == ["retired", "retired", "retired", "champion"]
    assert story(made, 3) == [
        ("published", "trainer", None),
        ("canary", "explorer", "a tenth"),
        ("promoted", "explorer", "better"),
    ]
    assert made.versions.events(3)[1].details == {"share": 0.1}


def test_only_a_candidate_becomes_canary_and_only_one(made: Ledger) -> None:
    trained(made)
    made.versions.begin_canary(3, by="explorer", reason="a tenth")
    for version, why in ((4, "version 3 is the canary"), (2, "version 2 is champion"), (9, "version 9 is unknown")):
        with pytest.raises(VersionRefused, match=why):
            made.versions.begin_canary(version, by="explorer", reason="another")
    assert states(made) == ["retired", "retired", "champion", "canary", "candidate"]
    assert (candidate := made.versions.candidate()) is not None
    assert candidate.version == 4


def test_a_champion_that_is_rolled_back_leaves_its_place_to_the_one_before(made: Ledger) -> None:
    assert made.versions.roll_back(2, by="anna", reason="it swears") == 1
    assert states(made) == ["retired", "champion", "rolled_back", "rejected"]
    assert made.versions.newest().version == 1
    assert story(made, 3)[-1] == ("rejected", "anna", "descends from version 2, which was rolled back")
    assert story(made, 1)[-1] == ("promoted", "anna", "version 2 was rolled back")
    assert made.versions.roll_back(1, by="anna", reason="it swears too") == 0
    with pytest.raises(VersionRefused, match="no version to go back to from version 0"):
        made.versions.roll_back(0, by="anna", reason="all swear")
    assert states(made) == ["champion", "rolled_back", "rolled_back", "rejected"]


def test_a_canary_that_is_rolled_back_takes_its_descendants_with_it_and_leaves_the_champion(made: Ledger) -> None:
    trained(made)
    made.versions.begin_canary(3, by="explorer", reason="a tenth")
    # Retired by now, 4 would be, had 3 become the champion.
    assert made.versions.roll_back(3, by="explorer", reason="worse", details={"p": 0.001}) == 2
    assert states(made) == ["retired", "retired", "champion", "rolled_back", "rejected"]
    assert (gone := made.versions.get(3)) is not None
    assert gone.reason == "worse"


def test_what_retired_unserved_is_not_gone_on_from_once_what_it_descends_from_is_rolled_back(made: Ledger) -> None:
    trained(made)
    made.versions.begin_canary(4, by="explorer", reason="a tenth")
    assert states(made) == ["retired", "retired", "champion", "retired", "canary"]
    assert made.versions.roll_back(2, by="anna", reason="it swears") == 1
    assert states(made) == ["retired", "champion", "rolled_back", "rejected", "rolled_back"]
    assert made.versions.newest().version == 1


def test_a_canary_that_retired_is_not_what_is_gone_back_to(made: Ledger) -> None:
    made.versions.begin_canary(3, by="explorer", reason="a tenth")
    made.versions.appoint(1, instead_of=2, by="anna", reason="as it was")
    assert states(made) == ["retired", "champion", "retired", "retired"]
    assert made.versions.roll_back(1, by="anna", reason="no") == 2


def test_only_what_serves_is_rolled_back(made: Ledger) -> None:
    for version, state in ((1, "retired"), (3, "candidate"), (9, "unknown")):
        with pytest.raises(VersionRefused, match=f"version {version} is {state}"):
            made.versions.roll_back(version, by="anna", reason="no")


def test_a_retired_version_is_rejected_by_who_means_it_and_the_base_model_never(made: Ledger) -> None:
    """What descends from it stays: it was made before anybody knew."""
    assert not made.versions.reject(1, "it swears")
    assert made.versions.reject(1, "it swears", by="anna", also_retired=True)
    assert not made.versions.reject(0, "it swears", by="anna", also_retired=True)
    assert states(made) == ["retired", "rejected", "champion", "candidate"]
    assert story(made, 1)[-1] == ("rejected", "anna", "it swears")
    assert made.versions.roll_back(2, by="anna", reason="it swears too") == 0


def test_who_means_the_canary_does_not_roll_back_what_has_become_of_it(made: Ledger) -> None:
    made.versions.begin_canary(3, by="explorer", reason="a tenth")
    made.versions.promote(3, by="anna")
    with pytest.raises(VersionRefused, match="version 3 is champion by now, not canary"):
        made.versions.roll_back(3, by="explorer", reason="worse", only_as=VersionState.CANARY)
    assert states(made) == ["retired", "retired", "retired", "champion"]
    assert made.versions.roll_back(3, by="explorer", reason="worse", only_as=VersionState.CHAMPION) == 2


def test_what_is_rejected_rolled_back_or_unknown_is_never_appointed(made: Ledger) -> None:
    made.versions.reject(3, "NaN in lm_head")
    made.versions.roll_back(2, by="anna", reason="it swears")
    for version, why in ((3, "version 3 is rejected: NaN in lm_head"), (2, "it swears"), (7, "there is no version 7")):
        with pytest.raises(VersionRefused, match=why):
            made.versions.appoint(version, instead_of=1, by="anna", reason="please")
        with pytest.raises(VersionRefused, match=why):
            made.versions.pin(version, instead_of=1, by="anna", reason="please")
    assert states(made) == ["retired", "champion", "rolled_back", "rejected"]


def test_a_pinned_version_stays_until_it_is_unpinned(made: Ledger) -> None:
    made.versions.begin_canary(3, by="explorer", reason="a tenth")
    made.versions.pin(1, instead_of=2, by="anna", reason="the release")
    assert states(made) == ["retired", "champion", "retired", "retired"]
    assert (pinned := made.versions.pinned_version()) is not None
    assert pinned.version == 1
    made.versions.pin(1, instead_of=1, by="anna", reason="again")
    for refused in (
        lambda: made.versions.pin(2, instead_of=1, by="bert", reason="no"),
        lambda: made.versions.appoint(2, instead_of=1, by="bert", reason="no"),
        lambda: made.versions.roll_back(1, by="bert", reason="no"),
    ):
        with pytest.raises(VersionRefused, match="version 1 is pinned"):
            refused()
    assert made.versions.unpin(by="anna") == 1
    assert made.versions.pinned_version() is None
    with pytest.raises(VersionRefused, match="no version is pinned"):
        made.versions.unpin(by="anna")
    assert [action for action, _, _ in story(made, 1)][-4:] == ["retired", "pinned", "promoted", "unpinned"]


def test_while_a_version_is_pinned_no_other_comes_into_service(made: Ledger) -> None:
    made.versions.pin(2, instead_of=2, by="anna", reason="the release")
    with pytest.raises(VersionRefused, match="version 2 is pinned"):
        made.versions.promote(3)
    with pytest.raises(VersionRefused, match="version 2 is pinned"):
        made.versions.begin_canary(3, by="explorer", reason="")
    assert made.versions.champion().version == 2
    made.versions.promote(2)


def test_a_former_champion_stands_in_for_a_damaged_one_and_takes_its_pin(made: Ledger) -> None:
    made.versions.pin(2, instead_of=2, by="anna", reason="the demo")
    assert made.versions.champions_before() == [1, 0]
    made.versions.stand_in(1, instead_of=2, reason="version 2 is damaged")
    assert states(made) == ["retired", "champion", "retired", "candidate"]
    assert (pinned := made.versions.pinned_version()) is not None
    assert pinned.version == 1
    assert story(made, 1)[-2:] == [
        ("pinned", "explorer", "version 2 is damaged"),
        ("promoted", "explorer", "version 2 is damaged"),
    ]
    with pytest.raises(VersionRefused, match="version 1 is the champion, not version 2"):
        made.versions.stand_in(0, instead_of=2, reason="again")
