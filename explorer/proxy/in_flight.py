"""One reply on its way from an engine to its client."""

import time

from tuneloop.explorer.capture.reply_id import TENANT
from tuneloop.explorer.engines.fleet import Engine
from tuneloop.explorer.proxy.request import Request
from tuneloop.shared.experience import Exchange


class ReplyInFlight:
    """A reply being spoken by an engine, and which weights may have written it."""

    def __init__(self, call: Request, engine: Engine) -> None:
        self.call = call
        self.version = engine.version
        self.kept = False
        self.engine = engine
        self._loads = engine.loads

    def exchange(self) -> Exchange:
        """What is kept of the request and of what was heard until now."""
        call, mixed = self.call, self.engine.loads != self._loads
        return Exchange(
            msg_id=call.msg_id,
            tenant=TENANT,
            endpoint=call.dialect.path,
            request=call.request,
            received_at=call.received_at,
            latency_s=time.monotonic() - call.started,
            experiences=call.teller.transcript.experiences(
                call.sampling,
                versions=(self.version, self.engine.version if mixed else self.version),
                mixed=mixed,
            ),
            task_id=call.labels.task_id,
            run_id=call.labels.run_id,
            user=call.labels.user,
            priority=call.labels.priority,
            engine=self.engine.number,
        )
