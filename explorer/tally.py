"""Adds up what several processes have counted, so that /metrics of any of them shows the whole service."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Metric

#: Gauges of which each process has its part. All others are the control process's alone.
_PARTS = frozenset({"tuneloop_requests_in_flight", "tuneloop_requests_waiting"})

_Key = tuple[str, str, tuple[tuple[str, str], ...]]
_Values = dict[_Key, float]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One number of a metric."""

    family: str
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


def counted(registry: CollectorRegistry) -> list[Sample]:
    """What a process has to add: its counters and histograms, and its parts of gauges."""
    families = registry.collect()
    return [sample for each in families if each.type != "gauge" or each.name in _PARTS for sample in _samples(each)]


class Tally:
    """The control process's own metrics, and with them what its workers have counted, those too that are no more."""

    def __init__(self, own: CollectorRegistry) -> None:
        self._own = own
        self._living: dict[int, Sequence[Sample]] = {}
        self._dead: _Values = {}

    def note(self, worker: int, samples: Sequence[Sample]) -> None:
        """Take down what a worker has counted until now."""
        self._living[worker] = samples

    def bury(self, worker: int) -> None:
        """Keep what a worker had counted that is no more, so that no counter falls."""
        _add(self._dead, [each for each in self._living.pop(worker, ()) if each.family not in _PARTS])

    def collect(self) -> Iterator[Metric]:
        """All metrics, as a registry tells them."""
        families = list(self._own.collect())
        values: _Values = {}
        for family in families:
            _add(values, _samples(family))
        for samples in self._living.values():
            _add(values, samples)
        _add(values, [Sample(*key, value) for key, value in self._dead.items()])
        for family in families:
            family.samples = []
        by_name = {family.name: family for family in families}
        for (name, sample, labels), value in values.items():
            by_name[name].add_sample(sample, dict(labels), value)
        yield from families


def _samples(family: Metric) -> list[Sample]:
    return [Sample(family.name, each.name, tuple(each.labels.items()), each.value) for each in family.samples]


def _add(values: _Values, samples: Iterable[Sample]) -> None:
    for each in samples:
        key = (each.family, each.name, each.labels)
        if each.name.endswith("_created"):
            values[key] = min(values.get(key, each.value), each.value)
        else:
            values[key] = values.get(key, 0.0) + each.value
