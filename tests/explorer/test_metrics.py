"""Metrics of several processes, added up."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tuneloop.explorer.metrics import VERSIONS_SHOWN, Metrics, ProcessTotals, process_samples


def collected(totals: ProcessTotals) -> dict[tuple[str, str], float]:
    """What /metrics says, by name and labels."""
    text = generate_latest(totals).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, ",".join(sample.labels.values())): sample.value for sample in samples}


def worker(requests: int, *, version: int = 0, in_flight: int = 0) -> CollectorRegistry:
    metrics = Metrics()
    for _ in range(requests):
        metrics.count_request("/chat", 200, version, 0.02)
    metrics.in_flight.set(in_flight)
    return metrics.registry


def test_what_workers_count_is_added_up() -> None:
    own = Metrics()
    own.outbox_refused.inc()
    totals = ProcessTotals(own.registry)
    totals.update(0, process_samples(worker(3, in_flight=1)))
    totals.update(1, process_samples(worker(4, version=1, in_flight=2)))
    found = collected(totals)
    assert found["tuneloop_requests_total", "/chat,200,0"] == 3
    assert found["tuneloop_requests_total", "/chat,200,1"] == 4
    assert found["tuneloop_request_seconds_count", "/chat"] == 7
    assert found["tuneloop_request_seconds_bucket", "/chat,0.01"] == 0
    assert found["tuneloop_request_seconds_bucket", "/chat,0.025"] == 7
    assert found["tuneloop_requests_in_flight", ""] == 3
    assert found["tuneloop_outbox_refused_total", ""] == 1


def test_gauges_of_the_service_are_the_control_processs_alone() -> None:
    own, other = Metrics(), Metrics()
    own.version_served.set(7)
    other.version_served.set(3)
    totals = ProcessTotals(own.registry)
    totals.update(0, process_samples(other.registry))
    assert collected(totals)["tuneloop_version_served", ""] == 7


def test_a_workers_latest_count_takes_the_place_of_the_one_before() -> None:
    totals = ProcessTotals(Metrics().registry)
    for requests in (3, 5):
        totals.update(0, process_samples(worker(requests)))
    assert collected(totals)["tuneloop_requests_total", "/chat,200,0"] == 5


def test_no_counter_falls_when_a_worker_dies_and_its_gauges_go() -> None:
    totals = ProcessTotals(Metrics().registry)
    for serial in range(3):
        totals.update(serial, process_samples(worker(2, in_flight=4)))
        totals.retire(serial)
    totals.retire(3)  # it died before it counted anything
    totals.update(4, process_samples(worker(1, in_flight=1)))
    found = collected(totals)
    assert found["tuneloop_requests_total", "/chat,200,0"] == 7
    assert found["tuneloop_requests_in_flight", ""] == 1


def test_names_and_labels_are_those_of_one_process() -> None:
    metrics = Metrics()
    metrics.count_request("/chat", 200, 0, 0.02)
    alone = {(name, labels) for name, labels in collected(ProcessTotals(metrics.registry))}
    totals = ProcessTotals(Metrics().registry)
    totals.update(0, process_samples(worker(1)))
    assert set(collected(totals)) == alone


def test_of_an_engine_that_was_ended_nothing_is_said_any_more() -> None:
    metrics = Metrics()
    for gauge in (metrics.last_good_probe, metrics.has_fingerprint):
        for engine in ("0", "1"):
            gauge.labels(engine).set(1)
    for _ in range(2):
        metrics.forget_engine(1)
    found = collected(ProcessTotals(metrics.registry))
    for name in ("tuneloop_engine_last_good_probe_timestamp_seconds", "tuneloop_engine_fingerprint"):
        assert [engine for each, engine in found if each == name] == ["0"]


def versions_in(totals: ProcessTotals) -> set[str]:
    """The versions that /metrics tells the requests of."""
    return {labels.split(",")[2] for name, labels in collected(totals) if name == "tuneloop_requests_total"}


def test_of_many_versions_those_counted_last_have_series() -> None:
    metrics = Metrics()
    for version in range(1, 3 * VERSIONS_SHOWN):
        metrics.count_request("/chat", 200, 0, 0.02)  # the champion for long
        metrics.count_request("/chat", 200, version, 0.02)
        metrics.count_reply(version, "whole")
    found = collected(ProcessTotals(metrics.registry))
    newest = {str(version) for version in range(3 * VERSIONS_SHOWN - VERSIONS_SHOWN + 1, 3 * VERSIONS_SHOWN)}
    assert versions_in(ProcessTotals(metrics.registry)) == {"0", *newest}
    assert found["tuneloop_requests_total", "/chat,200,0"] == 3 * VERSIONS_SHOWN - 1
    assert len([name for name, _ in found if name == "tuneloop_replies_total"]) == VERSIONS_SHOWN
    assert found["tuneloop_request_seconds_count", "/chat"] == 2 * (3 * VERSIONS_SHOWN - 1)


def test_no_version_falls_while_one_process_tells_of_it_and_another_no_more() -> None:
    forgetful, other, totals = Metrics(), Metrics(), ProcessTotals(Metrics().registry)
    for metrics in (forgetful, other):
        metrics.count_request("/chat", 200, 0, 0.02)
        totals.update(id(metrics), process_samples(metrics.registry))
    for version in (*range(1, 1 + VERSIONS_SHOWN), 0):
        forgetful.count_request("/chat", 200, version, 0.02)
        totals.update(id(forgetful), process_samples(forgetful.registry))
        assert collected(totals)["tuneloop_requests_total", "/chat,200,0"] == (2 if version else 3)


def test_versions_that_no_process_tells_of_are_forgotten_in_the_end() -> None:
    metrics, totals = Metrics(), ProcessTotals(Metrics().registry)
    for version in range(3 * VERSIONS_SHOWN):
        metrics.count_request("/chat", 200, version, 0.02)
        totals.update(0, process_samples(metrics.registry))
        assert len(versions_in(totals)) <= 2 * VERSIONS_SHOWN
    assert versions_in(totals) == {str(version) for version in range(VERSIONS_SHOWN, 3 * VERSIONS_SHOWN)}
