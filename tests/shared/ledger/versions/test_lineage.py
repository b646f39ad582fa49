from tests.factories import committed, experience, ids, leased, published, trained
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.operations.version_report import compare_versions, list_versions, report_version


def test_a_version_tells_whose_replies_it_was_trained_on(ledger: Ledger) -> None:
    assert ledger.evaluations.trained_on(1) == {}
    trained(ledger, 2)
    committed(ledger, experiences=(experience(version_min=1, version_max=1),))
    epoch, samples = leased(ledger, 3)
    ledger.training.register(epoch, ids(samples), step=2, publish=published)
    assert ledger.evaluations.trained_on(1) == {0: 2}
    assert ledger.evaluations.trained_on(2) == {0: 2, 1: 1}


def test_the_reports_are_the_same_on_either_database(ledger: Ledger) -> None:
    trained(ledger)
    trained(ledger)
    assert [(row.version, row.trained_on) for row in list_versions(ledger)] == [(2, 1), (1, 1)]
    told = report_version(ledger, 2)
    assert (told.parent, told.trained_on_replies_of, [event.action for event in told.events]) == (
        None,
        {0: 1},
        ["published"],
    )
    assert compare_versions(ledger, 1, 2).difference is None
