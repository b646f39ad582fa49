"""Very many requests that nobody thought of: none fails or hangs, none gets another's reply, and the sums are right."""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from tests.explorer.running import eventually
from tests.hostile.bed import ADMIN_KEY, Bed, bed_with
from tests.hostile.echo import echo_process
from tests.hostile.generated.machine import Clients
from tests.hostile.generated.openapi import own_description
from tests.hostile.generated.traffic import Traffic
from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyGrant

#: The requests of the long version, of which the state machine sends the larger part.
REQUESTS = int(os.environ.get("TUNELOOP_TEST_REQUESTS", "100000"))

#: What an example of the state machine sends about, in so many steps.
_REQUESTS_OF_EXAMPLE, _STEPS = 100, 40

#: Then it is said how many requests there have been.
_EXAMPLES_AT_ONCE = 50

_HOW = settings(
    deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=False
)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    folder = tmp_path_factory.mktemp("generated")
    with echo_process(folder) as url, bed_with(folder, [url], workers=2) as found:
        yield found
        found.is_sound()


def end(traffic: Traffic) -> None:
    """Close the clients and say what they have sent."""
    traffic.close()
    print(f"{traffic.requests} requests: {dict(traffic.statuses)}, refusals: {dict(traffic.codes)}")  # noqa: T201


@pytest.fixture
def traffic(bed: Bed) -> Iterator[Traffic]:
    found = Traffic(bed)
    yield found
    end(found)


def live(traffic: Traffic, *, requests: int, derandomize: bool) -> None:
    """Let the state machine send about so many requests; not derandomized, so many at least."""
    Clients.traffic = traffic
    until = traffic.requests + requests
    while True:
        examples = min(max((until - traffic.requests) // _REQUESTS_OF_EXAMPLE, 1), _EXAMPLES_AT_ONCE)
        how = settings(_HOW, max_examples=examples, stateful_step_count=_STEPS, derandomize=derandomize)
        run_state_machine_as_test(Clients, settings=how)
        print(f"{traffic.requests} requests: {dict(traffic.statuses)}", flush=True)  # noqa: T201
        if derandomize or traffic.requests >= until:
            break


def send_from_description(traffic: Traffic, *, requests: int, derandomize: bool) -> None:
    """Send what schemathesis makes of our own description, as it says and otherwise, evenly over the routes."""
    schema = schemathesis.openapi.from_dict(own_description())
    operations = [found.ok() for found in schema.get_all_operations()]
    for operation in operations:
        modes = [operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode]

        @settings(_HOW, max_examples=max(requests // len(operations), 1), derandomize=derandomize)
        @given(case=st.one_of(modes))
        def send(case: schemathesis.Case) -> None:
            path, sent = quote(case.formatted_path, safe="/%"), {}
            if isinstance(case.body, bytes):
                sent = {"content": case.body}
            elif case.body is not schemathesis.core.NOT_SET:
                is_form = path.startswith("/ui") and isinstance(case.body, dict)
                sent = {"data": case.body} if is_form else {"json": case.body}
            traffic.send(case.method, path, params=case.query or None, admin=path.startswith("/admin"), **sent)

        send()


def test_a_state_machine_of_clients(traffic: Traffic) -> None:
    live(traffic, requests=1500, derandomize=True)
    assert traffic.requests > 250


def is_let_in(bed: Bed, secret: str) -> bool:
    """Whether each of four connections knows the key: workers hear of keys one after the other."""
    headers = {"Authorization": f"Bearer {secret}"}
    models = bed.http.base_url.join("/v1/models")
    return all(httpx.get(models, headers=headers).status_code != 401 for _ in range(4))


@pytest.fixture
def of_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """Clients of two tenants, each task's with one tenant's key."""
    with echo_process(tmp_path) as url, bed_with(tmp_path, [url], workers=2) as bed:
        scopes = set(Scope) - {Scope.ADMIN, Scope.METRICS}
        keys = [bed.key("app", tenant, tuple(scopes)).removeprefix("Bearer ") for tenant in ("acme", "globex")]
        bed.http.headers["Authorization"] = f"Bearer {ADMIN_KEY}"
        monkeypatch.setattr(Clients, "keys", keys)
        found = Traffic(bed)
        yield found
        end(found)
        bed.is_sound()


def test_a_state_machine_of_two_tenants_clients(of_tenants: Traffic) -> None:
    live(of_tenants, requests=600, derandomize=True)
    assert of_tenants.requests > 100
    assert not of_tenants.statuses[401]


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Traffic]:
    """Clients of two tenants, an administrator of one, and the operator, where nobody comes in without a key."""
    with echo_process(tmp_path) as url, bed_with(tmp_path, [url]) as bed:
        ledger, all_but_admin = bed.ledger(), tuple(set(Scope) - {Scope.ADMIN, Scope.METRICS})
        grants = [
            KeyGrant(name="app", tenant="acme", scopes=all_but_admin),
            KeyGrant(name="app", tenant="globex", scopes=all_but_admin),
            KeyGrant(name="ops", tenant="acme", scopes=(Scope.ADMIN,)),
        ]
        secrets = [ledger.keys.create(grant, actor="test")[1] for grant in grants]
        ledger.close()
        bed.http.headers["Authorization"] = f"Bearer {ADMIN_KEY}"
        eventually(lambda: all(is_let_in(bed, secret) for secret in secrets))
        found = Traffic(bed, keys=[*secrets, ADMIN_KEY])
        yield found
        end(found)
        bed.is_sound()


def test_holders_of_keys_send_what_our_own_description_says(keyed: Traffic) -> None:
    send_from_description(keyed, requests=150, derandomize=True)
    assert keyed.requests > 80
    assert keyed.statuses[200] > 20
    assert keyed.unauthorized <= {"/ui/login"}  # whose form brings a key of its own


@pytest.mark.soak
def test_holders_of_keys_send_ten_thousand_requests(keyed: Traffic) -> None:
    send_from_description(keyed, requests=REQUESTS // 10, derandomize=False)
    assert keyed.requests >= REQUESTS // 20


@pytest.mark.soak
def test_a_hundred_thousand_requests_of_two_tenants(of_tenants: Traffic) -> None:
    live(of_tenants, requests=REQUESTS, derandomize=False)
    assert of_tenants.requests >= REQUESTS


@pytest.mark.soak
def test_a_hundred_thousand_requests(traffic: Traffic) -> None:
    live(traffic, requests=REQUESTS, derandomize=False)
    send_from_description(traffic, requests=REQUESTS // 50, derandomize=False)
    assert traffic.requests >= REQUESTS
