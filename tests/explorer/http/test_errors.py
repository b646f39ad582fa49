"""What a client is told of what went wrong, and what not."""

import pytest

from tuneloop.explorer.http.errors import error_response, refusal_of
from tuneloop.shared.errors import LedgerForbidden, LedgerUnavailable, TuneloopError

SECRETS = 'connection to server at "db.internal" (10.0.0.7), user "trainer" failed; /data/job/ledger.db'


@pytest.mark.parametrize("error", [LedgerUnavailable(SECRETS), LedgerForbidden(SECRETS), TuneloopError(SECRETS)])
def test_no_error_names_what_is_the_operators(error: Exception) -> None:
    refusal = refusal_of(error)
    body = bytes(error_response(refusal, "/commit", None).body).decode()
    assert not [word for word in ("db.internal", "10.0.0.7", "trainer", "/data") if word in body]
    assert refusal.status in {500, 503}
