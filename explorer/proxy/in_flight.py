"""One reply on its way from an engine to its client."""

import time

from tuneloop.explorer.capture.sampling import Sampling
from tuneloop.explorer.edge import Headers
from tuneloop.explorer.engines.fleet import Engine
from tuneloop.explorer.proxy.request import Request
from tuneloop.shared.experience import Exchange


class ReplyInFlight:
    """A reply that an engine is sampling, and the versions that may have sampled it."""

    def __init__(self, request: Request, engine: Engine) -> None:
        self.request = request
        self.version = engine.version
        self.recorded = False
        self.engine = engine
        self._loads = engine.loads

    def headers(self, kind: tuple[bytes, bytes]) -> Headers:
        """The headers of the response to the client, whose content is of this kind."""
        attested = [(b"x-tuneloop-attested", self.engine.proof.encode())] if self.engine.proof else []
        return [*self.request.headers(self.version, kind), *attested]

    def exchange(self, sampling: Sampling) -> Exchange:
        """The exchange to record: the request, and the reply as far as it has arrived, sampled so."""
        request, mixed = self.request, self.engine.loads != self._loads
        return Exchange(
            msg_id=request.msg_id,
            tenant=request.caller.tenant,
            key=request.caller.name,
            endpoint=request.dialect.path,
            request=request.body,
            received_at=request.received_at,
            stamp=request.stamp,
            latency_s=time.monotonic() - request.started,
            experiences=request.writer.transcript.experiences(
                sampling,
                versions=(self.version, self.engine.version if mixed else self.version),
                mixed=mixed,
            ),
            task_id=request.labels.task_id,
            run_id=request.labels.run_id,
            user=request.labels.user,
            priority=request.labels.priority,
            engine=self.engine.number,
        )
