"""Keeps the collection of garbage from stopping a process for a moment."""

import gc

#: Full collections are rare then; what a reply or a record is made of is freed by its references' counts.
_THRESHOLD = (20_000, 20, 20)


def freeze_garbage() -> None:
    """Look no more through what this process has opened and imported until now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLD)
