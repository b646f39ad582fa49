"""Policies behind two workers: both know who answers, at the same moment."""

from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer import adapters
from tests.explorer.processes.test_workers import Staff
from tests.explorer.running import HELLO, eventually
from tests.explorer.test_main import attached_to, job, service, write_settings

pytestmark = pytest.mark.xdist_group("workers")


def version(client: httpx.Client, name: str) -> int:
    reply = client.post(CHAT, json=HELLO | {"model": name})
    return int(reply.headers["x-tuneloop-version"]) if reply.status_code == 200 else -reply.status_code


def test_what_answers_at_one_worker_answers_at_the_other(tmp_path: Path, double: EngineDouble) -> None:
    lora = {"rank": adapters.RANK, "resident": 1}
    look = {"explorer__workers": 2, "explorer__service_status_check_interval": 0.1}
    settings = write_settings(tmp_path, **look, model__lora=lora, **attached_to(double))
    base = adapters.write_base(tmp_path / "model")
    with service(settings) as (process, http), ExitStack() as stack:
        staff = Staff(tmp_path, process, http, double)
        clients, ledger = [*staff.clients_of_both(stack).values()], staff.ledger()
        stack.callback(ledger.close)
        policies = {name: ledger.policies.create(name, by="tests").id for name in ("one", "other")}
        for name in policies:
            eventually(lambda seen=name: all(version(each, seen) > 0 for each in clients))
        made = {}
        for name, number in policies.items():
            made[name] = adapters.register(ledger, job(tmp_path), base, policy=number)
            eventually(lambda seen=name: made[seen] in {version(each, seen) for each in clients})
            assert [version(each, name) for each in clients] == [made[name]] * 2
        # One adapter at a time: what a worker has loaded for itself, the other may ask.
        for client in (*clients, *reversed(clients)):
            assert [version(client, name) for name in policies] == [*made.values()]
            assert len(double.adapters) == 1
        ledger.policies.delete(policies["one"], by="tests")
        eventually(lambda: [version(each, "one") for each in clients] == [-404, -404])
        assert [version(each, "other") for each in clients] == [made["other"]] * 2
