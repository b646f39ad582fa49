"""A folder that others move away and back while it is looked at."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event


@contextmanager
def moving(folder: Path) -> Iterator[None]:
    """Within the block it is there and elsewhere by turns, as fast as a thread can move it."""
    elsewhere, ended = folder.with_name(f"{folder.name}-elsewhere"), Event()

    def move() -> None:
        while not ended.is_set():
            folder.rename(elsewhere)
            elsewhere.rename(folder)

    with ThreadPoolExecutor(1) as pool:
        moved = pool.submit(move)
        try:
            yield
        finally:
            ended.set()
        moved.result()
