"""Imports rows of a file into a ledger: experiences of another ledger, or plain conversations.

Each row becomes a record as if just captured, so the ledger's rules apply. Existing rows stay, rewards are recomputed
from the feedback, and a row starts as recorded, rewarded or dropped.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import orjson
import typer

from tuneloop.cli import files
from tuneloop.cli.exports import NO_TOKEN_IDS
from tuneloop.cli.files import RowLocation
from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, TenantOption, open_to_group, tell, with_progress
from tuneloop.shared.errors import EnvironmentRefused, FileRefused, TuneloopError
from tuneloop.shared.experience import (
    MAX_NAME,
    MAX_REWARD,
    REDACTED,
    Exchange,
    Experience,
    Feedback,
    Kind,
    Record,
    State,
    pack_ids,
    pack_logprobs,
)
from tuneloop.shared.job_marks import KEY, load_key, touch_committed
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording.retention import stored_name
from tuneloop.shared.ledger.storage.database import upgrade
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.settings.loader import read_settings

#: Mistakes of a file that are listed; more would repeat them.
_MAX_MISTAKES = 20

_PAGE = 500

#: The endpoint of conversations, of which no file says when they were.
_UNDATED = "imported"

Id = Annotated[int, msgspec.Meta(ge=REDACTED, lt=1 << 31)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
MsgId = Annotated[str, msgspec.Meta(min_length=1, max_length=96)]
Short = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
#: Seconds since 1970. The API accepts no other times either.
Time = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
Choice = Annotated[int, msgspec.Meta(ge=0, lt=1 << 15)]


class ImportedFeedback(msgspec.Struct, kw_only=True):
    event_id: Short
    call_id: Short
    kind: Kind
    metric: Name
    received_at: Time
    msg_id: MsgId | None = None
    choice: Choice | None = None
    value: Annotated[float, msgspec.Meta(ge=-MAX_REWARD, le=MAX_REWARD)] | None = None
    text: str | None = None
    other_msg_id: MsgId | None = None
    other_choice: Choice | None = None
    task_id: Name | None = None
    run_id: Name | None = None
    source: Name | None = None
    occurred_at: Time | None = None

    def __post_init__(self) -> None:
        if (self.value is not None) != (self.kind in (Kind.NUMBER, Kind.BOOLEAN)):
            raise ValueError(f"a {self.kind} {'with' if self.value is not None else 'without'} a value")
        if (self.text is not None) != (self.kind in (Kind.LABEL, Kind.COMMENT, Kind.DEMONSTRATION)):
            raise ValueError(f"a {self.kind} {'with' if self.text is not None else 'without'} a text")
        if (self.other_msg_id is not None) != (self.kind is Kind.PREFERENCE):
            raise ValueError(f"a {self.kind} {'with' if self.other_msg_id is not None else 'without'} another reply")
        if self.msg_id is None and None in (self.task_id, self.run_id):
            raise ValueError("feedback about nothing: neither msg_id nor task_id and run_id")

    def record(self, tenant: str) -> Feedback:
        return Feedback(tenant=tenant, **msgspec.structs.asdict(self))


class ExperienceRow(msgspec.Struct, kw_only=True):
    """A row of an exported file of experiences; what has no meaning elsewhere, such as a lease, is not read."""

    msg_id: MsgId
    choice: Choice
    tenant: Short
    endpoint: Short
    request: str
    text: str
    prompt_ids: list[Id]
    completion_ids: list[Id]
    logprobs: list[float | None]
    temperature: float
    state: State
    version_min: Id
    version_max: Id
    sampled_at: Time
    latency_s: float
    priority: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)] = 0.0
    tool_calls: list[Any] | str | None = None
    finish_reason: Annotated[str, msgspec.Meta(max_length=32)] | None = None
    reason: str | None = None
    unsampled: str | None = None
    reward: float | None = None
    user: Name | None = None
    task_id: Name | None = None
    run_id: Name | None = None
    feedback: list[ImportedFeedback] = []

    def __post_init__(self) -> None:
        if len(self.completion_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.completion_ids)} completion_ids, {len(self.logprobs)} logprobs")
        if self.version_min > self.version_max:
            raise ValueError("version_min is greater than version_max")
        if not all(map(math.isfinite, (self.latency_s, self.temperature))):
            raise ValueError("latency_s and temperature must be finite")
        _read_json("request", self.request)
        if isinstance(self.tool_calls, str) and not isinstance(_read_json("tool_calls", self.tool_calls), list):
            raise ValueError("tool_calls must be a list")

    def records(self) -> Iterator[Record]:
        calls = orjson.dumps(self.tool_calls) if isinstance(self.tool_calls, list) else self.tool_calls
        logprobs = [math.nan if each is None else each for each in self.logprobs]
        lacks_logprobs = self.state is not State.DROPPED and bool(logprobs) and all(map(math.isnan, logprobs))
        sampled = Experience(
            choice=self.choice,
            prompt_ids=pack_ids(self.prompt_ids),
            completion_ids=pack_ids(self.completion_ids),
            logprobs=pack_logprobs(logprobs),
            version_min=self.version_min,
            version_max=self.version_max,
            temperature=self.temperature,
            finish_reason=self.finish_reason,
            text=self.text,
            tool_calls=calls.encode() if isinstance(calls, str) else calls,
            drop_reason=(self.reason or "imported") if self.state is State.DROPPED else None,
            # The weights that would know what was not captured are another experiment's.
            unsampled=self.unsampled or ("not_captured" if lacks_logprobs else None),
        )
        yield Exchange(
            msg_id=self.msg_id,
            tenant=self.tenant,
            endpoint=self.endpoint,
            request=self.request.encode(),
            received_at=self.sampled_at,
            latency_s=self.latency_s,
            experiences=(sampled,),
            task_id=self.task_id,
            run_id=self.run_id,
            user=self.user,
            priority=self.priority,
        )
        yield from (each.record(self.tenant) for each in self.feedback)


class ConversationMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None


class Conversation(msgspec.Struct, kw_only=True):
    messages: Annotated[list[ConversationMessage], msgspec.Meta(min_length=2)]
    tools: list[Any] | str | None = None
    msg_id: MsgId | None = None
    user: Name | None = None
    task_id: Name | None = None
    run_id: Name | None = None

    def __post_init__(self) -> None:
        if self.messages[-1].role != "assistant":
            raise ValueError("the last of the messages must be the assistant's")
        if not isinstance(self.messages[-1].content, str | None):
            raise ValueError("the answer's content must be a text")


class ImportResult(NamedTuple):
    """The result of an import: `changed_rewards` counts rows whose reward differs under this ledger's rule.

    `refused` counts rows that were erased or deleted before; `released` counts rows released for training.
    """

    rows: int
    new: int
    changed_rewards: int
    refused: int = 0
    released: int = 0


class ParsedRow(NamedTuple):
    msg_id: str
    choice: int
    reward: float | None
    records: Sequence[Record]


def import_file(
    ledger: Ledger,
    path: Path,
    *,
    tenant: str = "default",
    redactor: Redactor | None = None,
    clock: Callable[[], float] | None = None,
    train: bool = False,
) -> ImportResult:
    """Import a file, all of its rows, redacted; a file with mistakes not at all. With `train` they are to be learnt.

    Raises FileRefused with the mistakes, or with the number of rows that are in when the ledger refused.
    """
    columns = frozenset(ExperienceRow.__struct_fields__ + Conversation.__struct_fields__)
    mistakes: list[str] = []
    for location in with_progress(files.read(path, columns), f"checking {path.name}"):
        try:
            parse_row(location, tenant=tenant, now=0.0)
        except (ValueError, TypeError) as error:  # the latter is of values that JSON does not have, such as bytes
            mistakes.append(f"{location.where}: {error}")
            if len(mistakes) > _MAX_MISTAKES:
                break
    if mistakes:
        more = ["and more"] if len(mistakes) > _MAX_MISTAKES else []
        raise FileRefused("\n".join([*mistakes[:_MAX_MISTAKES], *more, f"{path}: nothing was imported"]))
    now = (clock or ledger.transactions.time)()
    locations = with_progress(files.read(path, columns), f"importing {path.name}")
    rows = (parse_row(location, tenant=tenant, now=now) for location in locations)
    result = ImportResult(0, 0, 0)
    while page := list(islice(rows, _PAGE)):
        try:
            msg_ids = {row.msg_id for row in page}
            before = ledger.exports.rewards_of(msg_ids)
            records = [record for row in page for record in row.records]
            erased = ledger.retention.erasures()
            taken = [
                each
                for each in (redactor.records(records) if redactor else records)
                if not (  # a conversation of a person who was erased: of other records the ledger knows by the time
                    isinstance(each, Exchange)
                    and each.endpoint == _UNDATED
                    and each.user is not None
                    and (each.tenant, stored_name(each.user)) in erased
                )
            ]
            ledger.recording.record(taken)
            released = ledger.file_rows.release(msg_ids, without_tokens=NO_TOKEN_IDS) if train else 0
            after = ledger.exports.rewards_of(msg_ids)
            new = {(row.msg_id, row.choice): row.reward for row in page if (row.msg_id, row.choice) not in before}
            changed = sum(1 for name, reward in new.items() if name in after and after[name] != reward)
            result = ImportResult(
                result.rows + len(page),
                result.new + len(new.keys() & after.keys()),
                result.changed_rewards + changed,
                result.refused + sum((row.msg_id, row.choice) not in after for row in page),
                result.released + released,
            )
        except TuneloopError as error:
            raise FileRefused(
                f"{path}: {error}\nThe first {result.rows} rows are in; import it again to go on: what is there stays"
            ) from error
    return result


def parse_row(location: RowLocation, *, tenant: str, now: float) -> ParsedRow:
    if location.row is None:
        raise ValueError(location.error)
    # A column that a row of Parquet does not have is null there.
    row = {name: value for name, value in location.row.items() if value is not None}
    if "completion_ids" in row:
        exported = msgspec.convert(row, ExperienceRow)
        return ParsedRow(exported.msg_id, exported.choice, exported.reward, list(exported.records()))
    if "messages" in row:
        conversation = msgspec.convert(row, Conversation)
        *prompt, answer = [  # a message of Parquet has every field that any message has
            {name: value for name, value in message.items() if value is not None or name == "content"}
            for message in row["messages"]
        ]
        tools = orjson.loads(conversation.tools) if isinstance(conversation.tools, str) else conversation.tools
        request = {"messages": prompt} | ({"tools": tools} if tools else {})
        whole = orjson.dumps([request, answer, tenant], option=orjson.OPT_SORT_KEYS)
        msg_id = conversation.msg_id or f"imported-{hashlib.sha256(whole).hexdigest()[:40]}"
        calls = answer.get("tool_calls")
        sampled = Experience(
            choice=0,
            prompt_ids=b"",
            completion_ids=b"",
            logprobs=b"",
            version_min=0,
            version_max=0,
            temperature=1.0,
            finish_reason="stop",
            text=answer.get("content") or "",
            tool_calls=orjson.dumps(calls) if calls else None,
            drop_reason=NO_TOKEN_IDS,
        )
        exchange = Exchange(
            msg_id=msg_id,
            tenant=tenant,
            endpoint=_UNDATED,
            request=orjson.dumps(request),
            received_at=now,
            latency_s=0.0,
            experiences=(sampled,),
            task_id=conversation.task_id,
            run_id=conversation.run_id,
            user=conversation.user,
        )
        return ParsedRow(msg_id, 0, None, [exchange])
    raise ValueError("neither an exported experience (completion_ids) nor a conversation (messages)")


def _read_json(name: str, text: str) -> Any:
    """What a text says that others will read as JSON, and write again. Raises ValueError if they could not."""
    try:
        found = orjson.loads(text)
        orjson.dumps(found)  # it may be nested more deeply than this allows
    except (orjson.JSONDecodeError, orjson.JSONEncodeError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    return found


def import_(
    config: ConfigOption,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .jsonl or .parquet file.")],
    tenant: TenantOption = "default",
    train: Annotated[bool, typer.Option("--train", help="Let the default policy learn them, with reward 1.")] = False,
    set_: SetOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Take experiences of another database in, or conversations as examples for SFT."""
    settings = read_settings(config, set_ or ()).valid_settings()
    if train and not settings.algorithm.of_imported_replies:
        raise EnvironmentRefused(
            f"--train: algorithm.algorithm_type: {settings.algorithm.algorithm_type} learns from other replies than"
            " those of files; write sft, raft or kto, or make a version of the file: tuneloop finetune"
        )
    open_to_group(settings)
    upgrade(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name)
    with closing(Ledger.of(settings)) as ledger:
        ledger.own(settings.project, settings.name)
        redactor = Redactor.open(settings, load_key(settings.job_dir / KEY))
        result = import_file(ledger, file, tenant=tenant, redactor=redactor, train=train)
    if result.released:
        touch_committed(settings.job_dir)
    told = {
        f"  {result.released} wait to be learnt": train,
        f"  {result.changed_rewards} have another reward by the rule here than in the file": result.changed_rewards,
        f"  {result.refused} are not taken: their people were erased, or they were deleted": result.refused,
    }
    lines = [f"{file}: {result.rows} rows, {result.new} of them new", *(line for line, holds in told.items() if holds)]
    tell({"file": str(file), **result._asdict()}, *lines, for_programs=for_programs)
