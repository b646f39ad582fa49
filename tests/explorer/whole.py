"""The whole explorer in one process, so that a test can look into all of it."""

from contextlib import AsyncExitStack

from tuneloop.explorer import app
from tuneloop.explorer.access.feedback_tokens import FeedbackTokens
from tuneloop.explorer.access.gatekeeper import Gatekeeper
from tuneloop.explorer.app import Services, open_services, open_spool
from tuneloop.explorer.background_tasks import OnFailure, Task
from tuneloop.explorer.capture.spool_slots import Slots
from tuneloop.explorer.http.server import FastRoutes
from tuneloop.explorer.processes.services import open_control_services
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings


def create_app(settings: Settings, ledger: Ledger, *, on_failure: OnFailure) -> FastRoutes:
    """The routes, and in the same process what runs beside them."""

    gate = Gatekeeper(settings, FeedbackTokens(load_key(settings.job_dir / KEY)))

    async def opening(stack: AsyncExitStack) -> tuple[Services, list[Task]]:
        spool, slots = open_spool(settings, stack), Slots(settings.spool_dir)
        slots.add(spool)
        services, tasks = await open_control_services(settings, ledger, slots, stack, on_failure=on_failure)
        gate.count_in(services.metrics.refused)
        gate.apply(services.key_watch.table)
        services.key_watch.subscribe(gate.publish)
        services, more = open_services(
            settings, ledger, spool=spool, fleet=services.fleet, metrics=services.metrics, control_client=services
        )
        return services, [*tasks, *more]

    return app.create_app(settings, ledger, gate=gate, opening=opening, on_failure=on_failure)
