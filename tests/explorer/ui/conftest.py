"""An explorer over a filled ledger, and a browser's way to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import make_url

from tests.databases import put_file
from tests.doubles.engine import engine_place
from tests.explorer.running import RunningExplorer, explorer_running, open_ledger, settings_for
from tests.explorer.ui.filled import SMALL, VERSIONS, Filler, Scale
from tuneloop.shared.experience import Exchange


class Filled(NamedTuple):
    """An explorer, and some of what is in its ledger."""

    explorer: RunningExplorer
    filler: Filler
    planted: Exchange

    def text(self, path: str, status: int = 200, **query: Any) -> str:
        """The page, as HTML."""
        answer = self.explorer.http.get(path, params=query or None)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        return answer.text


@contextmanager
def filled_running(folder: Path, scale: Scale = SMALL, **explorer: Any) -> Iterator[Filled]:
    """An explorer over a ledger that has some time behind it; the keyword arguments are settings of `explorer`."""
    with engine_place() as place:
        settings = settings_for(folder, [place.fresh().url], **explorer)
        buffer = settings.buffer.model_copy(update={"train_batch_size": scale.batch})
        settings = settings.model_copy(update={"buffer": buffer})
        put_file(f"sqlite:///{settings.job_dir}/ledger.db", "migrated")
        found_by_settings = Path(make_url(settings.database_url).database or "")
        found_by_settings.parent.mkdir()
        found_by_settings.symlink_to(settings.job_dir / "ledger.db")
        ledger = open_ledger(settings)
        filler = Filler(settings, ledger.transactions.engine, scale)
        filler.fill(hostile=False)
        planted = filler.plant() if scale.hostile else filler.exchange(VERSIONS)
        with explorer_running(settings) as running:
            yield Filled(running, filler, planted)
        ledger.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """An explorer without an admin key, for all tests of a file: filling its ledger takes seconds."""
    with filled_running(tmp_path_factory.mktemp("filled")) as found:
        yield found
