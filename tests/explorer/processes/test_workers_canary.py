"""A version that is tried, behind two workers."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


@contextmanager
def trying(folder: Path, doubles: list[EngineDouble], **rollout: object) -> Iterator[tuple[Staff, list[httpx.Client]]]:
    """A service of two workers that tries version 1 on one of two engines, and a client of each worker."""
    urls = {**attached_to(doubles[0]), "explorer__rollout_model__engine_urls": [each.url for each in doubles]}
    but = {f"rollout__{name}": value for name, value in rollout.items()} | urls
    settings = write_settings(folder, explorer__workers=2, explorer__service_status_check_interval=0.1, **but)
    with service(settings) as (process, http), ExitStack() as stack:
        staff = Staff(folder, process, http, doubles[0])
        clients, ledger = staff.clients_of_both(stack), staff.ledger()
        stack.callback(ledger.close)
        register(ledger, job(folder))
        eventually(lambda: ledger.versions.all()[1].state is VersionState.CANARY)
        eventually(lambda: 'tuneloop_engines{state="ready"} 2.0' in http.get("/metrics").text)
        yield staff, [*clients.values()]


def ids_of(staff: Staff) -> Counter[str]:
    """What is on disk, and how often."""
    return Counter(each for ids in staff.kept().values() for each in ids)


def tried_by(doubles: list[EngineDouble]) -> EngineDouble:
    """The engine that has what is tried."""
    (found,) = [each for each in doubles if each.weights.parent.name == "global_step_1"]
    return found


def test_both_workers_give_it_the_same_users_and_neither_any_other(tmp_path: Path, doubles: list[EngineDouble]) -> None:
    with trying(tmp_path, doubles, mode="canary", share=SHARE) as (staff, clients):
        for client in clients:
            eventually(partial(meets, client, by_hash()))
        ledger = staff.ledger()
        ledger.versions.roll_back(1, by="admin:anna", reason="it swears")
        for client in clients:
            eventually(partial(meets, client, dict.fromkeys(USERS, 0)))
        ledger.close()
