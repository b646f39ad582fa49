"""Ids of spans, and that nothing of OpenTelemetry is imported unless it is asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.explorer.running import settings_for
from tuneloop.shared.telemetry.opening import open_tracing
from tuneloop.shared.telemetry.spans import SpanId, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_clients_header_is_read_as_w3c_has_it() -> None:
    found = parse_traceparent(f"00-{TRACE}-{SPAN}-01")
    assert found is not None
    assert (found.id, found.sampled) == (SpanId(int(TRACE, 16), int(SPAN, 16)), True)
    assert found.id.traceparent == f"00-{TRACE}-{SPAN}-01"
    unsampled, later = parse_traceparent(f"00-{TRACE}-{SPAN}-00"), parse_traceparent(f"cc-{TRACE}-{SPAN}-03-more")
    assert unsampled is not None
    assert later is not None
    assert (unsampled.sampled, later.sampled) == (False, True)


BROKEN = [f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}"]


@pytest.mark.parametrize("header", [None, "", "x", *BROKEN])
def test_a_header_that_is_none_is_as_if_it_were_not_there(header: str | None) -> None:
    assert parse_traceparent(header) is None


def test_nothing_is_imported_unless_it_is_asked_for(tmp_path: Path) -> None:
    modules = "tuneloop.explorer.app, tuneloop.explorer.processes.services"
    code = f"import sys, {modules}; print([each for each in sys.modules if each.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
    assert open_tracing(settings_for(tmp_path), "explorer") is None
