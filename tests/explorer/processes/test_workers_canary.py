"""A version that is tried, behind two workers."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.doubles.engine import CHAT, EngineDouble
from tests.explorer.checkpoints import register
from tests.explorer.processes.test_workers import Staff
from tests.explorer.running import HELLO, eventually
from tests.explorer.test_main import attached_to, job, service, write_settings
from tests.explorer.versions.test_trial import SHARE, USERS, by_hash
from tuneloop.shared.experience import VersionState

pytestmark = pytest.mark.xdist_group("workers")


def meets(client: httpx.Client, versions: dict[str, int]) -> bool:
    """Whether these versions answer the users at a worker."""
    replies = {user: client.post(CHAT, json=HELLO | {"user": user}) for user in USERS}
    return {user: int(reply.headers["x-tuneloop-version"]) for user, reply in replies.items()} == versions


def test_both_workers_give_it_the_same_users_and_neither_any_other(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    urls = {**attached_to(doubles[0]), "explorer__rollout_model__engine_urls": [each.url for each in doubles]}
    rollout = {"rollout__mode": "canary", "rollout__share": SHARE}
    settings = write_settings(
        tmp_path, explorer__workers=2, explorer__service_status_check_interval=0.1, **rollout, **urls
    )
    with service(settings) as (process, http), ExitStack() as stack:
        staff = Staff(tmp_path, process, http, doubles[0])
        clients, ledger = staff.clients_of_both(stack).values(), staff.ledger()
        stack.callback(ledger.close)
        register(ledger, job(tmp_path))
        eventually(lambda: ledger.versions.all()[1].state is VersionState.CANARY)
        eventually(lambda: 'tuneloop_engines{state="ready"} 2.0' in http.get("/metrics").text)
        for client in clients:
            eventually(partial(meets, client, by_hash()))
        ledger.versions.roll_back(1, by="admin:anna", reason="it swears")
        for client in clients:
            eventually(partial(meets, client, dict.fromkeys(USERS, 0)))
