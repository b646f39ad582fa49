"""Turns lines of fine-tuning files into committed rows, and ends jobs.

The position in a file is written in the transaction of its rows, under the trainer's epoch. So a trainer that replaces
a killed one continues after the last stored line.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from sqlalchemy import and_, func, or_, select, text, update

from tuneloop.shared.errors import JobRefused
from tuneloop.shared.experience import Exchange, JobState, State
from tuneloop.shared.ledger.policies import OPEN, Job, change_state, job_of, note_event
from tuneloop.shared.ledger.recording.retention import deleted_among
from tuneloop.shared.ledger.recording.reward_rule import OF_A_FILE
from tuneloop.shared.ledger.recording.rewards import id_of_rule
from tuneloop.shared.ledger.storage.codec import exchange_row, experience_row, unpack_text
from tuneloop.shared.ledger.storage.database import LedgerPart, again_after_deadlock, alone, find, portions, put
from tuneloop.shared.ledger.storage.job_schema import jobs
from tuneloop.shared.ledger.storage.schema import COMMITTED, exchanges, experiences
from tuneloop.shared.ledger.training.training import fence, newest_version

ENDPOINT = "file"

#: The log-probabilities of a row that was not sampled.
UNSAMPLED = "of a file"

#: What a row is rewarded with that is to be learnt, unless it has feedback.
_REWARD = 1.0


class WrittenReply(NamedTuple):
    """A reply that was imported as text: its request, and what it says."""

    request: bytes
    text: str
    tool_calls: bytes | None


class FileRow(NamedTuple):
    """What is learnt of a line, and what each of its replies is rewarded with; two of them are a pair."""

    exchange: Exchange
    rewards: Sequence[float]


class FileChunk(NamedTuple):
    """How far a file was taken before and after these rows, in lines of all epochs; the `tokens` of the rows."""

    before: int
    after: int
    rows: Sequence[FileRow] = ()
    tokens: int = 0
    warnings: Sequence[str] = ()


class FileRows(LedgerPart):
    @again_after_deadlock
    def take(self, epoch: int, job: Job, taken: FileChunk) -> bool:
        """Keep rows of some lines, committed; the job runs then. False if it is over, or its file was taken further."""
        now = self._clock()
        with self._write() as connection:
            fence(connection, epoch)
            alone(connection, "record", shared=True)  # else a deletion might not see the rows, nor they the deletion
            there = connection.execute(select(jobs).where(jobs.c.id == job.id).with_for_update()).one()
            if there.state not in {JobState.QUEUED, JobState.RUNNING} or there.rows_taken != taken.before:
                return False
            erased = deleted_among({each.exchange.msg_id for each in taken.rows}, connection.execute)
            rows = [each for each in taken.rows if each.exchange.msg_id not in erased]
            version, rule = newest_version(connection, job.policy), id_of_rule(connection, OF_A_FILE, now=now)
            said = {"state": State.COMMITTED.value, "reward_rule": rule, "rewarded_at": now, "committed_at": now}
            sampled = {"version_min": version, "version_max": version, "sampled_at": now, "policy": job.policy}
            put(connection, exchanges, [{**exchange_row(each.exchange), "received_at": now} for each in rows])
            put(
                connection,
                experiences,
                [
                    {**experience_row(row.exchange, choice), **sampled, **said, "reward": reward}
                    for row in rows
                    for choice, reward in zip(row.exchange.experiences, row.rewards, strict=True)
                ],
            )
            pairs = [each.exchange.msg_id for each in rows if len(each.rewards) > 1]
            if pairs:
                first = experiences.alias()
                same = select(func.min(first.c.id)).where(first.c.msg_id == experiences.c.msg_id).scalar_subquery()
                paired = update(experiences).where(experiences.c.msg_id.in_(pairs), experiences.c.correction == 0)
                connection.execute(paired.values(group_id=same))
            counted = {"rows_taken": taken.after, "trained_tokens": there.trained_tokens + taken.tokens}
            connection.execute(update(jobs).where(jobs.c.id == job.id).values(counted))
            for each in taken.warnings:
                note_event(connection, job.id, now, each, level="warn")
            if there.state == JobState.QUEUED:
                change_state(connection, job.id, JobState.RUNNING, "Fine-tuning job started", now, {})
            return True

    def count_lines(self, epoch: int, job: Job, rows_in_all: int) -> None:
        with self._write() as connection:
            fence(connection, epoch)
            connection.execute(update(jobs).where(jobs.c.id == job.id).values(rows_in_all=rows_in_all))

    @again_after_deadlock
    def release(self, msg_ids: Collection[str], *, without_tokens: str) -> int:
        """Commit imported replies for the default policy; how many. `without_tokens`: why some were dropped."""
        now, released = self._clock(), 0
        with self._write() as connection:
            of_file = {"reward": _REWARD, "rewarded_at": now, "reward_rule": id_of_rule(connection, OF_A_FILE, now=now)}
            aside = and_(experiences.c.state == State.DROPPED, experiences.c.reason == without_tokens)
            unrated = or_(experiences.c.state == State.RECORDED, and_(aside, experiences.c.rewarded_at.is_(None)))
            rated = or_(experiences.c.state == State.REWARDED, aside)
            unsampled = {"unsampled": func.coalesce(experiences.c.unsampled, UNSAMPLED)}
            committed = {"state": State.COMMITTED, "committed_at": now, "reason": None} | unsampled
            for portion in portions(msg_ids):
                for which, reward in ((unrated, of_file), (rated, {})):
                    these = update(experiences).where(experiences.c.msg_id.in_(portion), which)
                    released += connection.execute(these.values(committed | reward)).rowcount
        return released

    def find_texts(self, msg_ids: Collection[str]) -> dict[str, WrittenReply]:
        columns = (exchanges.c.msg_id, exchanges.c.request, experiences.c.text, experiences.c.tool_calls)
        chosen = select(*columns).join(experiences, experiences.c.msg_id == exchanges.c.msg_id)
        rows = find(self._read, chosen, exchanges.c.msg_id, msg_ids)
        return {row.msg_id: WrittenReply(unpack_text(row.request), row.text, row.tool_calls) for row in rows}

    def are_left(self, policy: int) -> bool:
        waits = experiences.c.policy == policy
        counted = (
            select(func.count()).select_from(experiences).where(waits, text(state)).scalar_subquery()
            for state in (COMMITTED, f"state = '{State.LEASED}'")
        )
        return any(self._read(select(*counted))[0])

    def count_dropped(self, policy: int) -> dict[str, int]:
        reasons = select(experiences.c.reason, func.count()).where(experiences.c.state == State.DROPPED)
        found = self._read(reasons.where(experiences.c.policy == policy).group_by(experiences.c.reason))
        return {reason: count for reason, count in found}

    def of_policy(self, policy: int) -> Job | None:
        rows = self._read(select(jobs).where(jobs.c.policy == policy, jobs.c.state.in_(OPEN)))
        return job_of(rows[0]) if rows else None

    def complete(self, epoch: int, job: Job, message: str, **values: Any) -> None:
        """End a job with a version. Its policy is trained no more, and answers."""
        self._end(epoch, job, JobState.SUCCEEDED, message, values)

    def fail(self, epoch: int, job: Job, reason: str, *, code: str = "training_failed") -> None:
        """End a job that cannot go on. What waits is dropped; versions that were made stay."""
        error = {"code": code, "message": reason, "param": "training_file" if code == "invalid_file" else None}
        self._end(epoch, job, JobState.FAILED, f"Fine-tuning job failed: {reason}", {"error": error})

    @again_after_deadlock
    def _end(self, epoch: int, job: Job, state: JobState, message: str, values: Mapping[str, Any]) -> None:
        with self._write() as connection:
            fence(connection, epoch)
            with suppress(JobRefused):  # Somebody has cancelled or paused it meanwhile.
                change_state(connection, job.id, state, message, self._clock(), values)
