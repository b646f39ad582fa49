from pathlib import Path

import pytest
from sqlalchemy import Engine, select

from tests.factories import exchange, experience, feedback, leased, published, trained
from tuneloop.shared.errors import EnvironmentRefused, LedgerError
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Ledger, VersionReward
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.settings.feedback import RewardRule


def states(ledger: Ledger) -> list[VersionState]:
    return [version.state for version in ledger.versions.all()]


def test_the_base_model_is_version_0_and_served(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/models/base"))
    champion = ledger.versions.champion()
    assert (champion.version, champion.state, champion.path) == (0, "champion", Path("/models/base"))
    assert champion.served_at is not None
    assert ledger.versions.newest() == champion
    assert ledger.versions.candidate() is None


def test_another_base_model_is_refused(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/models/base"))
    with pytest.raises(EnvironmentRefused, match=r"^model\.model_path: this experiment began with /models/base"):
        ledger.versions.ensure_base(Path("/models/other"))
    assert ledger.versions.champion().path == Path("/models/base")


def test_a_promoted_candidate_retires_the_champion_and_older_candidates(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/base"))
    for _ in range(3):
        trained(ledger)
    ledger.versions.promote(2)
    assert states(ledger) == ["retired", "retired", "champion", "candidate"]
    assert ledger.versions.champion().version == 2


def test_a_version_that_a_newer_one_retired_stays_retired(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/base"))
    old, new = trained(ledger), trained(ledger)
    ledger.versions.promote(new)
    ledger.versions.promote(old)
    assert states(ledger) == ["retired", "retired", "champion"]


def test_what_is_rejected_or_unknown_is_not_promoted(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/base"))
    ledger.versions.reject(trained(ledger), "worse")
    with pytest.raises(LedgerError, match="version 1 is rejected: it cannot be served"):
        ledger.versions.promote(1)
    with pytest.raises(LedgerError, match="version 9 is unknown: it cannot be served"):
        ledger.versions.promote(9)
    assert ledger.versions.champion().version == 0


def test_a_rejected_candidate_keeps_the_reason(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/base"))
    version = trained(ledger)
    ledger.versions.reject(version, "the probe differs")
    ledger.versions.reject(version, "something else")
    assert ledger.versions.all()[1].reason == "the probe differs"
    assert ledger.versions.newest().version == 0
    assert ledger.versions.candidate() is None


def test_the_candidate_is_the_newest_above_the_champion(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/base"))
    for _ in range(3):
        trained(ledger)
    ledger.versions.reject(3, "worse")
    candidate = ledger.versions.candidate()
    assert candidate is not None
    assert candidate.version == 2
    assert ledger.versions.newest().version == 2
    ledger.versions.promote(2)
    assert ledger.versions.candidate() is None


def test_a_database_has_one_owner(ledger: Ledger) -> None:
    ledger.own("shop", "assistant")
    ledger.own("shop", "assistant")
    with pytest.raises(EnvironmentRefused, match="belongs to shop/assistant, not to shop/other"):
        ledger.own("shop", "other")


def test_rewards_are_told_by_version(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/base"))
    trained(ledger)
    told = exchange(experiences=(experience(choice=0, version_min=1, version_max=1), experience(choice=1)))
    ledger.recording.record([told, feedback(msg_id=told.msg_id, choice=0, value=-0.5)])
    assert ledger.reports.rewards() == [VersionReward(0, 2, 1, 1.0), VersionReward(1, 1, 1, -0.5)]


def test_a_reply_that_was_compensated_is_one_reply_with_its_first_reward(engine: Engine) -> None:
    ledger = Ledger(engine, rule=RewardRule(), compensate_late=True)
    epoch, [sample, *_] = leased(ledger, 2)
    ledger.training.register(epoch, [sample.id], step=1, publish=published)
    ledger.recording.record([feedback(msg_id=sample.msg_id, value=-0.5, received_at=1e9)])
    with engine.connect() as connection:
        assert sorted(connection.execute(select(experiences.c.correction)).scalars()) == [0, 0, 1]
    assert ledger.reports.rewards() == [VersionReward(0, 2, 2, 2.0)]
