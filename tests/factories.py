"""Values for tests: each function makes a plausible one, with what matters to the test said in its arguments."""

import itertools
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, insert, text

from tuneloop.runner.outbox import Outbox
from tuneloop.shared.experience import Exchange, Experience, Feedback, Sample, encode, pack_ids, pack_logprobs
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.recording.reward_rule import definition
from tuneloop.shared.ledger.storage.codec import to_blob
from tuneloop.shared.ledger.storage.schema import reward_rules
from tuneloop.shared.settings.feedback import RewardRule

SHA256 = "5" * 64

_numbers = itertools.count(1)


def experience(**but: Any) -> Experience:
    fields: dict[str, Any] = {
        "choice": 0,
        "prompt_ids": pack_ids([1, 2, 3]),
        "completion_ids": pack_ids([4, 5]),
        "logprobs": pack_logprobs([-0.5, -0.25]),
        "version_min": 0,
        "version_max": 0,
        "temperature": 1.0,
        "finish_reason": "stop",
        "text": "Hello.",
    }
    return Experience(**fields | but)


def exchange(**but: Any) -> Exchange:
    fields: dict[str, Any] = {
        "msg_id": f"chatcmpl-{next(_numbers)}",
        "tenant": "acme",
        "endpoint": "/v1/chat/completions",
        "request": b'{"messages": []}',
        "received_at": float(next(_numbers)),
        "latency_s": 0.5,
        "experiences": (experience(),),
    }
    return Exchange(**fields | but)


def feedback(**but: Any) -> Feedback:
    """Later than any made before it."""
    fields: dict[str, Any] = {
        "event_id": f"event-{next(_numbers)}",
        "call_id": "call",
        "msg_id": "chatcmpl-0",
        "choice": None,
        "tenant": "acme",
        "value": 1.0,
        "received_at": float(next(_numbers)),
    }
    return Feedback(**fields | but)


def outboxed(folder: Path, *records: Exchange | Feedback) -> str:
    """Records on disk that the ledger does not have, as an explorer leaves them; the id of their file."""
    with closing(Outbox(folder, 1 << 20)) as outbox:
        return outbox.append([encode(each) for each in records]).file


def take(ledger: Ledger, file: str, number: int) -> None:
    """Let the ledger have the records of a file up to this number, as far as it knows, long ago."""
    with ledger.transactions.write() as connection:
        words = "INSERT INTO outbox_files (file, number, seen_at) VALUES (:file, :number, :seen_at)"
        connection.execute(text(words), {"file": file, "number": number, "seen_at": 0.0})


def refuse(ledger: Ledger, file: str, *payloads: bytes, reason: str = "out of range") -> None:
    """Let the database have refused what a file held."""
    rows = [
        {"file": file, "end": end, "number": end, "reason": reason, "payload": payload, "at": 1000.0}
        for end, payload in enumerate(payloads, start=1)
    ]
    words = "INSERT INTO refused_records (file, end_offset, number, reason, payload, refused_at)"
    with ledger.transactions.write() as connection:
        connection.execute(text(f"{words} VALUES (:file, :end, :number, :reason, :payload, :at)"), rows)


def rewarded(ledger: Ledger, count: int = 1, **but: Any) -> list[Exchange]:
    """Exchanges in the ledger that have their reward, but are not committed; `but` goes to `exchange`."""
    said = [exchange(**but) for _ in range(count)]
    ledger.recording.record([*said, *(feedback(msg_id=each.msg_id, tenant=each.tenant) for each in said)])
    return said


def committed(ledger: Ledger, count: int = 1, **but: Any) -> list[Exchange]:
    """Exchanges in the ledger that the trainer may lease."""
    said = rewarded(ledger, count, **but)
    ledger.recording.commit("acme")
    return said


def leased(ledger: Ledger, count: int = 1) -> tuple[int, list[Sample]]:
    """A new epoch, and that many experiences leased under it."""
    committed(ledger, count)
    epoch = ledger.training.take_epoch("trainer")
    return epoch, ledger.training.lease(epoch, count, BatchRules())


def fill(engine: Engine, count: int) -> None:
    """Many committed experiences, ids 1 to `count`, in two statements."""
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})"
    name = "'chatcmpl-filled-' || i"
    with engine.begin() as connection:
        connection.execute(insert(reward_rules).values(id=1, definition=definition(RewardRule()), created_at=0))
        connection.execute(
            text(
                "INSERT INTO exchanges (msg_id, tenant, endpoint, request, received_at, latency_s) "
                f"{numbers} SELECT {name}, 'acme', '/', :request, i, 0 FROM n"
            ),
            {"request": b"{}"},
        )
        connection.execute(
            text(
                "INSERT INTO experiences (id, msg_id, choice, correction, tenant, priority, state, reward, "
                "reward_rule, version_min, version_max, temperature, text, completion_tokens, blob, sampled_at, "
                "rewarded_at, committed_at) "
                f"{numbers} SELECT i, {name}, 0, 0, 'acme', 0, 'committed', 1, 1, 0, 0, 1, '', 2, :blob, i, 0, 0 FROM n"
            ),
            {"blob": to_blob(experience())},
        )


def published(version: int) -> tuple[Path, str]:
    """What `publish` answers when all went well."""
    return Path(f"/checkpoints/global_step_{version}"), SHA256


def trained(ledger: Ledger, count: int = 1) -> int:
    """A new version in the ledger, trained on that many experiences."""
    epoch, samples = leased(ledger, count)
    return ledger.training.register(epoch, ids(samples), step=1, publish=published)


def ids(samples: Sequence[Sample]) -> list[int]:
    return [sample.id for sample in samples]
