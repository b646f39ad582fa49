"""Alarms of which each machine has its own: their reasons begin with what they are about."""

import structlog

from tuneloop.shared.ledger.versions.alarms import Alarm, Alarms

log = structlog.get_logger()


def write_own_alarm(alarms: Alarms, name: str, reason: str | None, *, about: str) -> None:
    """Raise the alarm of a name with a reason, which begins with `about`; None clears it, where it is about that.

    Raises LedgerError.
    """
    if reason is not None:
        if alarms.raise_alarm(Alarm(name, reason)):
            log.error("alarm_raised", name=name, reason=reason)
    elif any(each.name == name and each.reason.startswith(about) for each in alarms.all()):
        alarms.clear(name)
