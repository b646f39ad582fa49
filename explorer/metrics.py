"""The explorer's Prometheus metrics. Names here are the names in docs/metrics.md; no ids or users as labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
        self.request_seconds = Histogram(
            "tuneloop_request_seconds",
            "From the request to the last byte of its reply",
            ["endpoint"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.recorded = Counter(
            "tuneloop_experiences_recorded",
            "Experiences brought to disk; reason is empty for those that can be trained on",
            ["reason"],
            registry=registry,
        )
        self.feedback = Counter("tuneloop_feedback", "Feedback events brought to disk", registry=registry)
        self.experiences = Gauge("tuneloop_experiences", "Experiences in the ledger", ["state"], registry=registry)
        self.ledger_imbalance = Gauge(
            "tuneloop_ledger_imbalance", "Sentences of the ledger that do not add up; 0 is right", registry=registry
        )
        self.spool_bytes = Gauge(
            "tuneloop_spool_bytes", "Bytes in the spool that the database has not taken", registry=registry
        )
        self.quarantined = Counter(
            "tuneloop_spool_quarantined", "Records that the database refused again and again", registry=registry
        )
        self.engines = Gauge("tuneloop_engines", "Engines by what they are doing", ["state"], registry=registry)
        self.version_served = Gauge("tuneloop_version_served", "The version that answers requests", registry=registry)
        self.reload_seconds = Histogram(
            "tuneloop_reload_seconds", "From pausing an engine to serving again", buckets=_SECONDS, registry=registry
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
