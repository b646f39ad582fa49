"""`python -m tuneloop.explorer.drain_folder CONFIG FOLDER`: moves the records of a left-over folder into the ledger."""

import asyncio
import sys
from contextlib import closing
from pathlib import Path

from tuneloop.explorer.drain import Drain
from tuneloop.explorer.older_spool import convert
from tuneloop.explorer.processes.lazy_ledger import LazyLedger
from tuneloop.runner.outbox import names_in
from tuneloop.shared.errors import LedgerUnavailable, StartupError, TuneloopError
from tuneloop.shared.logging import configure_logging
from tuneloop.shared.settings.loader import load_settings
from tuneloop.shared.settings.settings import Settings

#: Longest wait for the database, in seconds.
_PATIENCE_S = 60.0


def drain_folder(settings: Settings, folder: Path) -> str:
    """Drain the folder and return a summary. Raises TuneloopError, OSError."""
    convert([folder], folder)
    before, failures, set_aside = len(names_in(folder)), list[TuneloopError](), list[None]()
    with closing(LazyLedger.of(settings)) as ledger:
        ledger.transactions.open()
        drain = Drain(
            folder,
            ledger.recording,
            taken=lambda owner, results: None,
            tell=lambda status, away: None,
            refused=lambda: set_aside.append(None),
            failed=failures.append,
            keep_s=0.0,
        )
        drain.start()
        is_clear = asyncio.run(drain.wait_until_taken(_PATIENCE_S))
        drain.stop()
    if failures:
        raise failures[0]
    if not is_clear:
        raise LedgerUnavailable("the database did not take everything; what is left stays in the folder: try again")
    held, refused = len(names_in(folder)), len(set_aside)
    said = f"{before - held} files are in the database, and were removed"
    said += f"; {refused} records were set aside: `tuneloop outbox list`" if refused else ""
    return said + (f"; {held} files belong to an explorer that runs" if held else "")


def main() -> None:
    """Drain the folder; exit with 1 if records remain."""
    configure_logging()
    config, folder = map(Path, sys.argv[1:])
    try:
        sys.stdout.write(drain_folder(load_settings(config), folder) + "\n")
    except TuneloopError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code if isinstance(error, StartupError) else 1)


if __name__ == "__main__":
    main()
