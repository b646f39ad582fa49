"""The explorer's Prometheus metrics. Names here are the names in docs/metrics.md; no ids or users as labels."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

from tuneloop.shared.ledger.explorers import NOT_STORED

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_LONG_SECONDS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        text = "Requests answered, by the version that answered"
        self._requests = VersionCounter("tuneloop_requests", text, ["endpoint", "status"], registry=registry)
        text = "Outcomes of the requests sent to each version's engines, whichever engine answered in the end"
        self._replies = VersionCounter("tuneloop_replies", text, ["outcome"], registry=registry)
        text = "From the request to the last byte of its reply"
        self.request_seconds = histogram("tuneloop_request_seconds", text, ["endpoint"])
        text = "Experiences written to the outbox; reason is empty for samples of the policy"
        self.recorded = counter("tuneloop_experiences_recorded", text, ["reason"])
        text = "Requests to be stored, by who makes the log-probabilities of their replies: the engine, or the trainer"
        self.captured = counter("tuneloop_replies_captured", text, ["by"])
        self.feedback = counter("tuneloop_feedback", "Feedback events, by outcome", ["kind", "outcome"])
        text = "Records in which something of a kind was redacted"
        self.redacted = counter("tuneloop_redacted", text, ["kind"])
        text = "Texts that were redacted whole, because a pattern of one's own took too long"
        self.patterns_timed_out = counter("tuneloop_patterns_timed_out", text, ["pattern"])
        text = "Runs whose feedback counted nothing, as their last call was cut off"
        self.unfinished_runs = counter("tuneloop_unfinished_runs", text)
        text = "Requests whose replies were not kept: `store_false`, by their own word, or by the settings"
        self.not_stored = counter(NOT_STORED, text, ["reason"])
        text = (
            "Requests that were refused by their heads: no key, an unknown one, a limit of one, or a website's request"
        )
        self.refused = counter("tuneloop_access_refused", text, ["reason"])
        self.in_flight = gauge("tuneloop_requests_in_flight", "Requests that are being answered")
        self.waiting = gauge("tuneloop_requests_waiting", "Requests that wait because too many are in flight")
        text = "Lines of the log that were dropped because the log's reader did not take them"
        self.log_dropped = counter("tuneloop_log_lines_dropped", text)
        text = "Runs of a background task that ended with an internal error: alarm on any"
        self.background_failures = counter("tuneloop_background_failures", text, ["task"])

        self.outbox_bytes = gauge("tuneloop_outbox_bytes", "Bytes in the outbox that are not yet in the database")
        self.outbox_records = gauge("tuneloop_outbox_records", "Records in the outbox that are not yet in the database")
        text = "Age of the oldest record that is not yet in the database"
        self.outbox_oldest_seconds = gauge("tuneloop_outbox_oldest_seconds", text)
        text = "Records set aside: the database refused them repeatedly, or they are damaged"
        self.outbox_refused = counter("tuneloop_outbox_refused", text)
        self.database_up = gauge("tuneloop_database_up", "1 while the database answers, else 0")
        self.purged = counter("tuneloop_purged", "Experiences deleted because of their age, by state", ["state"])

        self.experiences = gauge("tuneloop_experiences", "Experiences in the ledger", ["state"])
        self.jobs = gauge("tuneloop_fine_tuning_jobs", "Fine-tuning jobs by state", ["state"])
        text = "How long the oldest one waits, of each state"
        self.waiting_seconds = gauge("tuneloop_waiting_seconds", text, ["state"])
        self.no_step = gauge("tuneloop_no_step", "1 for each reason why no training step is happening", ["reason"])
        self.trainer_up = gauge("tuneloop_trainer_up", "1 if a trainer was seen in the last minute")
        text = "Experiences committed for each that is trained on, in the last ten minutes; 0 if none is"
        self.training_lag = gauge("tuneloop_training_lag", text)
        text = "Feedback in the ledger whose reply has not been recorded yet"
        self.feedback_pending = gauge("tuneloop_feedback_pending", text)
        self.ledger_imbalance = gauge("tuneloop_ledger_imbalance", "Violated invariants of the ledger; 0 is right")
        text = "By how much a clock, this machine's or the database's, is ahead of the ledger's time"
        self.clock_skew = gauge("tuneloop_clock_skew_seconds", text, ["clock"])
        self.held_back = gauge("tuneloop_held_back", "Experiences that a rater's share keeps out of batches")
        self.alarm = gauge("tuneloop_alarm", "1 for each open alarm", ["name"])

        self.version_newest = gauge("tuneloop_version_newest", "The newest version")
        text = "How long the oldest version waits that is newer than the champion and may be served; 0: none"
        self.version_waiting = gauge("tuneloop_version_waiting_seconds", text)
        text = "When the newest version was registered, with the steps in it"
        self.last_version = gauge("tuneloop_last_version_timestamp_seconds", text)
        self.version_served = gauge("tuneloop_version_served", "The version that answers requests")
        self.version_decisions = counter("tuneloop_version_decisions", "Decisions about versions", ["action", "by"])
        text = "Mean reward of the replies of each of the newest versions that have rewards"
        self.version_reward = gauge("tuneloop_version_reward", text, ["version"])
        text = "From an experience's feedback to serving the version trained on it"
        self.feedback_to_served = histogram("tuneloop_feedback_to_served_seconds", text, buckets=_LONG_SECONDS)
        text = "The candidate version that is served beside the champion; 0: none"
        self.canary_version = gauge("tuneloop_canary_version", text)
        text = "The share of the requests that the canary version answers"
        self.canary_share = gauge("tuneloop_canary_share", text)
        self._add_engines_and_judge(registry)
        self._durations = cache(self.request_seconds.labels)
        self._recorded_counters = cache(self.recorded.labels)

    def _add_engines_and_judge(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        self.engines = gauge("tuneloop_engines", "Engines by state", ["state"])
        self.probes = counter("tuneloop_engine_probes", "Proofs of weights, by outcome", ["outcome"])
        text = "Start of the engine's last proof that matched"
        self.last_good_probe = gauge("tuneloop_engine_last_good_probe_timestamp_seconds", text, ["engine"])
        text = "1 if the engine's last good proof included the fingerprint of its weights"
        self.has_fingerprint = gauge("tuneloop_engine_fingerprint", text, ["engine"])
        self.reload_seconds = histogram("tuneloop_reload_seconds", "From leaving the rotation to serving again")
        text = "When an engine last sent something of a reply"
        self.last_reply = gauge("tuneloop_last_reply_timestamp_seconds", text)

        self.judged = counter("tuneloop_judged", "Replies sent to the judge, by outcome", ["outcome"])
        self.judge_seconds = histogram("tuneloop_judge_seconds", "From sending a reply to the judge to its verdict")
        self.judge_tokens = counter("tuneloop_judge_tokens", "Tokens of verdicts, as the judge counts them", ["kind"])
        # From 0 on: Prometheus sees no increase in a series that begins with 1.
        for metric, *values in (
            (self.probes, "matched", "mismatched", "failed"),
            (self.judged, "judged", "failed", "away", "not_kept"),
            (self.judge_tokens, "prompt", "completion"),
        ):
            for value in values:
                metric.labels(value)
        for action, by in itertools.product(("rejected", "rolled_back"), ("explorer", "admin")):
            self.version_decisions.labels(action, by)

    def count_request(self, endpoint: str, status: int, version: int | None, seconds: float) -> None:
        """Count a request that has been answered; `version` None: it was sent to no engine."""
        self._requests.inc(version, endpoint, str(status))
        self._durations(endpoint).observe(seconds)

    def count_reply(self, version: int, outcome: Literal["whole", "failed", "refused", "unclear"]) -> None:
        self._replies.inc(version, outcome)

    def count_recorded(self, reason: str) -> None:
        """Count an experience that is on disk; `reason` is why it is not a sample of the policy, else empty."""
        self._recorded_counters(reason).inc()

    def forget_engine(self, number: int) -> None:
        """Remove the series of an engine that has ended: no alert may say that it was not proven for long."""
        for gauge in (self.last_good_probe, self.has_fingerprint):
            gauge.remove(str(number))


#: So many versions, those counted last, have series of their own in what a process counts by version.
VERSIONS_SHOWN = 32

_VERSION = "version"

#: Gauges that are the sum over all processes. All others are the control process's alone.
_SUMMED_GAUGES = frozenset({"tuneloop_requests_in_flight", "tuneloop_requests_waiting"})


_SampleKey = tuple[str, str, tuple[tuple[str, str], ...]]

_Values = dict[_SampleKey, float]


class VersionCounter:
    """A counter with the label `version`, of the versions counted last: a label's values must not grow for ever."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._counter = Counter(name, documentation, [*labels, _VERSION], registry=registry)
        #: By version, the one counted longest ago first, then by the other labels.
        self._counted: dict[str, dict[tuple[str, ...], Counter]] = {}

    def inc(self, version: int | None, *labels: str) -> None:
        """Count one for a version; None has an empty label."""
        label = "" if version is None else str(version)
        counters = self._counted[label] = self._counted.pop(label, {})
        if labels not in counters:
            counters[labels] = self._counter.labels(*labels, label)
            if len(self._counted) > VERSIONS_SHOWN:
                oldest = next(iter(self._counted))
                for each in self._counted.pop(oldest):
                    self._counter.remove(*each, oldest)
        counters[labels].inc()


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    family: str
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


def process_samples(registry: CollectorRegistry) -> list[MetricSample]:
    families = registry.collect()
    summed = [each for each in families if each.type != "gauge" or each.name in _SUMMED_GAUGES]
    return [sample for each in summed for sample in _samples(each)]


class ProcessTotals:
    def __init__(self, own: CollectorRegistry) -> None:
        self._own = own
        self._live: dict[int, Sequence[MetricSample]] = {}
        self._retired: _Values = {}

    def update(self, worker: int, samples: Sequence[MetricSample]) -> None:
        """Replace what a worker has counted until now. What it no longer counts is kept, so that no counter falls."""
        told = {_key_of(each) for each in samples}
        self._keep(each for each in self._live.get(worker, ()) if _key_of(each) not in told)
        self._live[worker] = samples

    def retire(self, worker: int) -> None:
        self._keep(self._live.pop(worker, ()))

    def _keep(self, samples: Iterable[MetricSample]) -> None:
        _add(self._retired, [each for each in samples if each.family not in _SUMMED_GAUGES])

    def collect(self) -> Iterator[Metric]:
        families = list(self._own.collect())
        values: _Values = {}
        for family in families:
            _add(values, _samples(family))
        for samples in self._live.values():
            _add(values, samples)
        # Counts are kept of versions that a process counts, and of the latest of others.
        told = {_version_in(each) for each in values}
        kept = dict.fromkeys(_version_in(each) for each in self._retired)
        forgotten = [each for each in kept if each not in told][:-VERSIONS_SHOWN]
        for key in [each for each in self._retired if _version_in(each) in forgotten]:
            del self._retired[key]
        _add(values, [MetricSample(*key, value) for key, value in self._retired.items()])
        for family in families:
            family.samples = []
        by_name = {family.name: family for family in families}
        for (name, sample, labels), value in values.items():
            by_name[name].add_sample(sample, dict(labels), value)
        yield from families


def _samples(family: Metric) -> list[MetricSample]:
    return [MetricSample(family.name, each.name, tuple(each.labels.items()), each.value) for each in family.samples]


def _key_of(sample: MetricSample) -> _SampleKey:
    return sample.family, sample.name, sample.labels


def _version_in(key: _SampleKey) -> str | None:
    return dict(key[2]).get(_VERSION)


def _add(values: _Values, samples: Iterable[MetricSample]) -> None:
    for each in samples:
        key = _key_of(each)
        if each.name.endswith("_created"):
            values[key] = min(values.get(key, each.value), each.value)
        else:
            values[key] = values.get(key, 0.0) + each.value
