"""The explorer's Prometheus metrics. Names here are the names in docs/metrics.md; no ids or users as labels."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_LONG_SECONDS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)


class Metrics:
    """All metrics of one explorer process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "tuneloop_requests",
            "Requests answered, by the version that answered",
            ["endpoint", "status", "version"],
            registry=registry,
        )
        self.replies = Counter(
            "tuneloop_replies",
            "What became of the requests that each version's engines were asked, whoever answered in the end",
            ["version", "outcome"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "tuneloop_request_seconds",
            "From the request to the last byte of its reply",
            ["endpoint"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.recorded = Counter(
            "tuneloop_experiences_recorded",
            "Experiences brought to disk; reason is empty for samples of the policy",
            ["reason"],
            registry=registry,
        )
        self.feedback = Counter(
            "tuneloop_feedback", "Feedback events, by what became of them", ["kind", "outcome"], registry=registry
        )
        self._of_the_ledger(registry)
        self.spool_bytes = Gauge(
            "tuneloop_spool_bytes", "Bytes in all spools that the database has not taken", registry=registry
        )
        self.spool_oldest_seconds = Gauge(
            "tuneloop_spool_oldest_seconds", "How long the oldest of them have waited for it", registry=registry
        )
        self.database_up = Gauge("tuneloop_database_up", "1 while the database answers, else 0", registry=registry)
        self.quarantined = Counter(
            "tuneloop_spool_quarantined", "Records that the database refused again and again", registry=registry
        )
        self.purged = Counter(
            "tuneloop_purged", "Experiences deleted because of their age, by state", ["state"], registry=registry
        )
        self.background_failures = Counter(
            "tuneloop_background_failures",
            "Turns of a background task that ended with an error of ours: alarm on any",
            ["task"],
            registry=registry,
        )
        self._of_the_engines(registry)
        self._of_what_is_tried(registry)
        self._of_the_judge(registry)
        self.in_flight = Gauge("tuneloop_requests_in_flight", "Requests that are being answered", registry=registry)
        self.waiting = Gauge(
            "tuneloop_requests_waiting", "Requests that wait because too many are in flight", registry=registry
        )
        self._answered = cache(self._counters_of)
        self._replied = cache(self.replies.labels)
        self._recorded = cache(self.recorded.labels)

    def answered(self, endpoint: str, status: int, version: int | None, seconds: float) -> None:
        """Count a request that has been answered; `version` None: no engine was asked."""
        count, duration = self._answered(endpoint, status, version)
        count.inc()
        duration.observe(seconds)

    def replied(self, version: int, outcome: Literal["whole", "failed", "refused"]) -> None:
        """Count what became of a request that an engine of a version was asked."""
        self._replied(str(version), outcome).inc()

    def brought_to_disk(self, reason: str) -> None:
        """Count an experience that is on disk; `reason` says why it is no sample of the policy, if it is none."""
        self._recorded(reason).inc()

    def _counters_of(self, endpoint: str, status: int, version: int | None) -> tuple[Counter, Histogram]:
        named = "" if version is None else str(version)
        return self.requests.labels(endpoint, status, named), self.request_seconds.labels(endpoint)

    def _of_the_engines(self, registry: CollectorRegistry) -> None:
        self.engines = Gauge("tuneloop_engines", "Engines by what they are doing", ["state"], registry=registry)
        self.version_served = Gauge("tuneloop_version_served", "The version that answers requests", registry=registry)
        self.probes = Counter(
            "tuneloop_engine_probes", "Proofs of engines' weights, by what came of them", ["outcome"], registry=registry
        )
        self.last_good_probe = Gauge(
            "tuneloop_engine_last_good_probe_timestamp_seconds",
            "When the last proof that found the engine right began",
            ["engine"],
            registry=registry,
        )
        for outcome in ("matched", "mismatched", "failed"):
            self.probes.labels(outcome)
        self.reload_seconds = Histogram(
            "tuneloop_reload_seconds",
            "From taking an engine out of rotation to serving again",
            buckets=_SECONDS,
            registry=registry,
        )
        self.rejected = Counter(
            "tuneloop_versions_rejected",
            "Versions that must not be served: alarm on any",
            registry=registry,
        )
        self.feedback_to_served = Histogram(
            "tuneloop_feedback_to_served_seconds",
            "From an experience's feedback to serving the version trained on it",
            buckets=_LONG_SECONDS,
            registry=registry,
        )

    def _of_what_is_tried(self, registry: CollectorRegistry) -> None:
        self.canary_version = Gauge(
            "tuneloop_canary_version", "The version that is being tried beside the champion; 0: none", registry=registry
        )
        self.canary_share = Gauge(
            "tuneloop_canary_share", "The part of the requests that it answers", registry=registry
        )
        self.rollouts = Counter(
            "tuneloop_rollouts",
            "Versions that were tried, by what the explorer has decided about them",
            ["action"],
            registry=registry,
        )
        for action in ("promote", "roll_back"):
            self.rollouts.labels(action)
        self.copies = Counter(
            "tuneloop_copies",
            "Copies of requests for a version that is being tried, by what became of them",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("answered", "failed", "dropped"):
            self.copies.labels(outcome)

    def _of_the_ledger(self, registry: CollectorRegistry) -> None:
        self.experiences = Gauge("tuneloop_experiences", "Experiences in the ledger", ["state"], registry=registry)
        self.waiting_seconds = Gauge(
            "tuneloop_waiting_seconds", "Since when the oldest experience waits", ["state"], registry=registry
        )
        self.no_step = Gauge(
            "tuneloop_no_step", "1 for the reasons why no training step is happening", ["reason"], registry=registry
        )
        self.trainer_up = Gauge("tuneloop_trainer_up", "1 if a trainer was seen in the last minute", registry=registry)
        self.feedback_pending = Gauge(
            "tuneloop_feedback_pending", "Feedback in the ledger that waits for its reply", registry=registry
        )
        self.ledger_imbalance = Gauge(
            "tuneloop_ledger_imbalance", "Sentences of the ledger that do not add up; 0 is right", registry=registry
        )
        self.alarm = Gauge("tuneloop_alarm", "1 for each open alarm of the training", ["name"], registry=registry)

    def _of_the_judge(self, registry: CollectorRegistry) -> None:
        self.judged = Counter(
            "tuneloop_judged", "Replies given to the judge, by what became of it", ["outcome"], registry=registry
        )
        self.judge_seconds = Histogram(
            "tuneloop_judge_seconds", "From taking up a reply to its verdict", buckets=_SECONDS, registry=registry
        )
        self.judge_tokens = Counter(
            "tuneloop_judge_tokens", "Tokens that verdicts took, as the judge counts them", ["kind"], registry=registry
        )
        for outcome in ("judged", "failed", "away", "not_kept"):
            self.judged.labels(outcome)
        for kind in ("prompt", "completion"):
            self.judge_tokens.labels(kind)


#: Gauges of which each process has its part. All others are the control process's alone.
_PARTS = frozenset({"tuneloop_requests_in_flight", "tuneloop_requests_waiting"})


_Key = tuple[str, str, tuple[tuple[str, str], ...]]


_Values = dict[_Key, float]


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    """One number of a metric."""

    family: str
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


def process_samples(registry: CollectorRegistry) -> list[MetricSample]:
    """What a process has to add: its counters and histograms, and its parts of gauges."""
    families = registry.collect()
    return [sample for each in families if each.type != "gauge" or each.name in _PARTS for sample in _samples(each)]


class ProcessTotals:
    """The control process's own metrics, and with them what its workers have counted, those too that are no more."""

    def __init__(self, own: CollectorRegistry) -> None:
        self._own = own
        self._living: dict[int, Sequence[MetricSample]] = {}
        self._dead: _Values = {}

    def note(self, worker: int, samples: Sequence[MetricSample]) -> None:
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
        _add(values, [MetricSample(*key, value) for key, value in self._dead.items()])
        for family in families:
            family.samples = []
        by_name = {family.name: family for family in families}
        for (name, sample, labels), value in values.items():
            by_name[name].add_sample(sample, dict(labels), value)
        yield from families


def _samples(family: Metric) -> list[MetricSample]:
    return [MetricSample(family.name, each.name, tuple(each.labels.items()), each.value) for each in family.samples]


def _add(values: _Values, samples: Iterable[MetricSample]) -> None:
    for each in samples:
        key = (each.family, each.name, each.labels)
        if each.name.endswith("_created"):
            values[key] = min(values.get(key, each.value), each.value)
        else:
            values[key] = values.get(key, 0.0) + each.value
