"""What each route does, takes and answers, as tables, and the OpenAPI 3.1 description that is made of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tuneloop.explorer.auth import OPEN, required_scopes
from tuneloop.shared import VERSION

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
NAME: Schema = {"type": "string", "maxLength": 256}
SCORE: Schema = {"type": ["number", "boolean"]}


def with_description(schema: Schema, description: str) -> Schema:
    """The schema, and what is meant by it."""
    return {**schema, "description": description}


def list_of(items: Schema) -> Schema:
    """A list of such items."""
    return {"type": "array", "items": items}


def body(*required: str, more: bool = False, **properties: Schema) -> Schema:
    """The schema of an object. `more`: other fields are passed on."""
    return {
        "type": "object",
        "properties": properties,
        **({"required": list(required)} if required else {}),
        **({"additionalProperties": True} if more else {}),
    }


class Operation(NamedTuple):
    """A route. `guide` is the file of docs/ that tells more."""

    group: str
    summary: str
    guide: str
    query: Mapping[str, Schema] = {}
    body: Schema | None = None
    streams: bool = False


_LABELS = with_description(
    {"type": "object"},
    "Labels, kept with the reply: `tuneloop_task_id`, `tuneloop_run_id`, `tuneloop_user`, `tuneloop_priority`, `train`"
    " (false: never trained on), and your own.",
)
_SAMPLING: Mapping[str, Schema] = {
    "model": with_description(TEXT, "As GET /v1/models lists it, or any other name if one model is served."),
    "temperature": NUMBER,
    "top_p": NUMBER,
    "stream": FLAG,
    "metadata": _LABELS,
}
_MESSAGES = list_of(body("role", role=TEXT, content={}, more=True))
_TOOLS = list_of({"type": "object"})
_REPLIES, _FEEDBACK, _STORED, _FILES = "Replies", "Feedback", "Stored replies", "Files and graders"
_JOBS = "Fine-tuning"
_TRAINING, _VERSIONS, _KEYS, _SERVICE = "Training", "Versions", "Keys and raters", "Service"

_SCORE: Mapping[str, Schema] = {
    **dict.fromkeys(("id", "name", "dataType", "comment"), TEXT),
    "traceId": with_description(NAME, "The id of a reply, or a name that its request carried."),
    "value": {"type": ["number", "boolean", "string"]},
}
_ENTRY: Mapping[str, Schema] = {
    "msg_ids": with_description(list_of(TEXT), "Ids of replies; `<id>:<n>` is one choice of several."),
    "task_id": with_description(NAME, "With `run_id` and without `msg_ids`: a whole run."),
    "run_id": NAME,
    "reward": with_description(SCORE, "What the replies are worth."),
    "metric": with_description(NAME, "The name under which `value` is stored."),
    "value": SCORE,
    "label": TEXT,
    "comment": TEXT,
    "demonstration": with_description(TEXT, "The answer that should have been given."),
    "preferred_over": with_description(TEXT, "The id of the reply to the same prompt that is worse."),
    "retract": with_description(FLAG, "Take back what the same source said before."),
    "source": with_description(NAME, "Who says so: a rater, a rule, a judge."),
    "time": with_description({"type": ["number", "string"]}, "When it was said: seconds since 1970, or ISO 8601."),
    "idempotency_key": with_description(NAME, "The same key twice counts once."),
}
_DECISION = body(reason=with_description(TEXT, "One line, kept with the event."), by=NAME, expect=INTEGER)
_REASONED = {**_DECISION, "required": ["reason"]}
_OF_UPLOADS = ("filename", "mime_type", "purpose")
_PAGE: Mapping[str, Schema] = {"limit": INTEGER, "order": {"enum": ["asc", "desc"]}, "after": TEXT}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        _REPLIES,
        "Answer a conversation. The reply is recorded; its `id` is what feedback names",
        "clients.md",
        body=body("messages", more=True, **_SAMPLING, messages=_MESSAGES, tools=_TOOLS, max_tokens=INTEGER, n=INTEGER),
        streams=True,
    ),
    ("POST", "/v1/completions"): Operation(
        _REPLIES,
        "Go on with a text",
        "clients.md",
        body=body("prompt", more=True, **_SAMPLING, prompt={}, max_tokens=INTEGER, n=INTEGER),
        streams=True,
    ),
    ("POST", "/v1/responses"): Operation(
        _REPLIES,
        "Answer in OpenAI's Responses format",
        "responses.md",
        body=body(
            "input", more=True, **_SAMPLING, input={}, instructions=TEXT, previous_response_id=TEXT, tools=_TOOLS
        ),
        streams=True,
    ),
    ("POST", "/v1/messages"): Operation(
        _REPLIES,
        "Answer in Anthropic's Messages format",
        "messages.md",
        body=body("messages", "max_tokens", more=True, **_SAMPLING, messages=_MESSAGES, system={}, max_tokens=INTEGER),
        streams=True,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        _REPLIES,
        "Count the tokens of a conversation",
        "messages.md",
        body=body("messages", more=True, messages=_MESSAGES),
    ),
    ("POST", "/tokenize"): Operation(
        _REPLIES,
        "The token ids of a text, or of a conversation's prompt",
        "clients.md",
        body=body(more=True, prompt=TEXT, messages=_MESSAGES),
    ),
    ("POST", "/detokenize"): Operation(
        _REPLIES, "The text of token ids", "clients.md", body=body("tokens", tokens=list_of(INTEGER))
    ),
    ("GET", "/tokenizer_info"): Operation(_REPLIES, "What the tokenizer is, where engines say it", "clients.md"),
    ("GET", "/v1/models"): Operation(_REPLIES, "The models, and versions that may be named", "clients.md"),
    ("GET", "/v1/models/{model}"): Operation(_REPLIES, "One model", "clients.md"),
    ("POST", "/v1/files"): Operation(
        _FILES, "Upload a file, as multipart/form-data: `file`, `purpose`, `expires_after[…]`", "files.md"
    ),
    ("GET", "/v1/files"): Operation(_FILES, "Files, newest first", "files.md", query={**_PAGE, "purpose": TEXT}),
    ("GET", "/v1/files/{id}"): Operation(_FILES, "One file", "files.md"),
    ("GET", "/v1/files/{id}/content"): Operation(_FILES, "What a file holds", "files.md"),
    ("DELETE", "/v1/files/{id}"): Operation(_FILES, "Delete a file; jobs that learn from it go on", "files.md"),
    ("POST", "/v1/uploads"): Operation(
        _FILES,
        "Begin a file that comes in parts",
        "files.md",
        body=body(
            "bytes",
            *_OF_UPLOADS,
            bytes=INTEGER,
            filename=TEXT,
            mime_type=TEXT,
            purpose=TEXT,
            expires_after={"type": "object"},
        ),
    ),
    ("POST", "/v1/uploads/{id}/parts"): Operation(_FILES, "Send a part, as multipart/form-data: `data`", "files.md"),
    ("POST", "/v1/uploads/{id}/complete"): Operation(
        _FILES, "Make the file of its parts", "files.md", body=body("part_ids", part_ids=list_of(TEXT), md5=TEXT)
    ),
    ("POST", "/v1/uploads/{id}/cancel"): Operation(_FILES, "Give an upload up", "files.md"),
    ("POST", "/v1/fine_tuning/alpha/graders/validate"): Operation(
        _FILES, "Check a grader", "files.md", body=body("grader", grader={"type": "object"})
    ),
    ("POST", "/v1/fine_tuning/alpha/graders/run"): Operation(
        _FILES,
        "Grade a reply",
        "files.md",
        body=body("grader", "model_sample", grader={"type": "object"}, item={"type": "object"}, model_sample=TEXT),
    ),
    ("DELETE", "/v1/models/{model}"): Operation(
        _JOBS, "Delete what a fine-tuning job has made: it answers nobody from now on", "fine_tuning.md"
    ),
    ("POST", "/v1/fine_tuning/jobs"): Operation(
        _JOBS,
        "Make a job, which learns from a file",
        "fine_tuning.md",
        body=body(
            "model",
            "training_file",
            model=with_description(TEXT, "The model, `model@version`, a policy, or what a job has made."),
            training_file=TEXT,
            validation_file=TEXT,
            method={"type": "object"},
            suffix=TEXT,
            seed=INTEGER,
            metadata={"type": "object", "additionalProperties": TEXT},
        ),
    ),
    ("GET", "/v1/fine_tuning/jobs"): Operation(
        _JOBS, "Jobs, newest first", "fine_tuning.md", query={"after": TEXT, "limit": INTEGER, "metadata[k]": TEXT}
    ),
    ("GET", "/v1/fine_tuning/jobs/{id}"): Operation(_JOBS, "One job", "fine_tuning.md"),
    ("GET", "/v1/fine_tuning/jobs/{id}/events"): Operation(
        _JOBS, "What happened to a job, newest first", "fine_tuning.md", query={"after": TEXT, "limit": INTEGER}
    ),
    ("GET", "/v1/fine_tuning/jobs/{id}/checkpoints"): Operation(
        _JOBS,
        "The versions that a job has made, newest first",
        "fine_tuning.md",
        query={"after": TEXT, "limit": INTEGER},
    ),
    ("POST", "/v1/fine_tuning/jobs/{id}/{action}"): Operation(
        _JOBS, "`cancel`, `pause` or `resume` a job", "fine_tuning.md"
    ),
    ("POST", "/feedback"): Operation(
        _FEEDBACK,
        "Say what replies are worth: now, or weeks later. 200 means that it is on disk",
        "feedback.md",
        body=body(
            more=False,
            **_ENTRY,
            feedback=with_description(list_of(body(more=False, **_ENTRY)), "Several entries at once."),
        ),
    ),
    ("POST", "/api/public/scores"): Operation(
        _FEEDBACK, "A Langfuse score, or a list of them, as feedback", "feedback.md", body=body(more=True, **_SCORE)
    ),
    ("DELETE", "/api/public/scores/{score_id}"): Operation(_FEEDBACK, "Take back a Langfuse score", "feedback.md"),
    ("POST", "/api/public/ingestion"): Operation(
        _FEEDBACK, "Langfuse's events, of which scores are kept", "feedback.md", body=body("batch", batch=list_of({}))
    ),
    ("POST", "/v1/feedback_tokens"): Operation(
        _FEEDBACK,
        "A token with which a browser gives feedback on one reply",
        "keys.md",
        body=body(
            "msg_id", msg_id=TEXT, source=NAME, expires_in=with_description(NUMBER, "Seconds."), max_events=INTEGER
        ),
    ),
    ("POST", "/commit"): Operation(
        _FEEDBACK,
        "Hand rewarded replies to the trainer",
        "runs.md",
        body=body(task_id=NAME, run_id=NAME, task_ids=list_of(NAME), time_threshold=NUMBER),
    ),
    ("GET", "/v1/chat/completions"): Operation(
        _STORED, "Stored chats, newest first unless asked otherwise", "stored.md", query={**_PAGE, "model": TEXT}
    ),
    ("GET", "/v1/chat/completions/{id}"): Operation(_STORED, "One stored chat", "stored.md"),
    ("POST", "/v1/chat/completions/{id}"): Operation(
        _STORED,
        "Change the labels of a stored chat",
        "stored.md",
        body=body("metadata", metadata={"type": "object", "additionalProperties": TEXT}),
    ),
    ("DELETE", "/v1/chat/completions/{id}"): Operation(_STORED, "Delete a stored chat", "stored.md"),
    ("GET", "/v1/chat/completions/{id}/messages"): Operation(
        _STORED, "The messages of a stored chat", "stored.md", query=_PAGE
    ),
    ("GET", "/v1/chat/completions/{id}/explain"): Operation(
        _STORED, "What happened to a reply of any route, and what it waits for", "explain.md"
    ),
    ("GET", "/v1/responses/{id}"): Operation(
        _STORED,
        "A stored response",
        "responses.md",
    ),
    ("GET", "/training"): Operation(
        _TRAINING, "What is served, what of the key's tenant waits, and why; how it trains", "runs.md"
    ),
    ("GET", "/training/calls"): Operation(
        _TRAINING,
        "How many calls of a run are recorded, and their tokens",
        "runs.md",
        query={"task_id": NAME, "run_id": NAME, "tokens": FLAG},
    ),
    ("GET", "/metrics"): Operation(_SERVICE, "Metrics, in Prometheus' format or as JSON", "metrics.md"),
    ("GET", "/health"): Operation(_SERVICE, "The service lives", "operations.md"),
    ("GET", "/health/live"): Operation(_SERVICE, "The service lives", "operations.md"),
    ("GET", "/api/hello"): Operation(_SERVICE, "The service lives", "messages.md"),
    ("GET", "/health/ready"): Operation(
        _SERVICE, "An engine answers, and disk and database can take records", "operations.md"
    ),
    ("GET", "/ping"): Operation(_SERVICE, "An engine answers", "operations.md"),
    ("POST", "/ping"): Operation(_SERVICE, "An engine answers", "operations.md"),
    ("GET", "/version"): Operation(_SERVICE, "The engine's release", "operations.md"),
    ("GET", "/"): Operation(_SERVICE, "Where to go from here, for browsers and as JSON", "clients.md"),
    ("GET", "/docs"): Operation(_SERVICE, "This description, for browsers", "clients.md"),
    ("GET", "/openapi.json"): Operation(_SERVICE, "This description, for programs", "clients.md"),
    ("GET", "/admin/versions"): Operation(_VERSIONS, "All versions of the weights", "versions.md"),
    ("GET", "/admin/versions/{version}"): Operation(_VERSIONS, "One version", "versions.md"),
    ("GET", "/admin/versions/events"): Operation(
        _VERSIONS, "Decisions about versions", "versions.md", query={"last": INTEGER, "version": INTEGER}
    ),
    ("GET", "/admin/versions/compare"): Operation(
        _VERSIONS, "Two versions side by side", "versions.md", query={"a": INTEGER, "b": INTEGER}
    ),
    ("POST", "/admin/versions/{version}/pin"): Operation(
        _VERSIONS, "Serve this version, whatever is published", "versions.md", body=_DECISION
    ),
    ("POST", "/admin/versions/unpin"): Operation(_VERSIONS, "Serve the champion again", "versions.md", body=_DECISION),
    ("POST", "/admin/versions/{version}/promote"): Operation(
        _VERSIONS, "Make a candidate the champion", "versions.md", body=_DECISION
    ),
    ("POST", "/admin/versions/{version}/reject"): Operation(
        _VERSIONS, "Never serve this candidate, or retired version", "versions.md", body=_REASONED
    ),
    ("POST", "/admin/versions/rollback"): Operation(
        _VERSIONS, "Go back to the champion before", "versions.md", body=_REASONED
    ),
    ("POST", "/admin/versions/{version}/rollback"): Operation(
        _VERSIONS, "Take this version out of service for good", "versions.md", body=_REASONED
    ),
    ("POST", "/admin/versions/{version}/unpin"): Operation(
        _VERSIONS, "Serve the champion of this version's policy again", "versions.md", body=_DECISION
    ),
    ("GET", "/admin/policies"): Operation(_VERSIONS, "Policies, a line each", "policies.md"),
    ("POST", "/admin/policies"): Operation(
        _VERSIONS,
        "Make a policy",
        "policies.md",
        body=body("name", name=NAME, tenant=NAME, parent=TEXT, options={"type": "object"}),
    ),
    ("POST", "/admin/policies/{name}/{action}"): Operation(
        _VERSIONS,
        "`pause`, `resume`, `delete` a policy, or `promote` its champion into another",
        "policies.md",
        body=body(tenant=NAME, into=NAME),
    ),
    ("GET", "/admin/raters"): Operation(_KEYS, "Raters, and whether the feedback of each counts", "feedback.md"),
    ("GET", "/admin/keys"): Operation(_KEYS, "Keys, without their secrets", "keys.md"),
    ("POST", "/admin/keys"): Operation(
        _KEYS,
        "Make a key: the one answer that has its secret",
        "keys.md",
        body=body(
            "name",
            name=NAME,
            scopes=list_of(TEXT),
            tenant=NAME,
            limits={"type": "object"},
            expires_in=NUMBER,
            policy=NAME,
        ),
    ),
    ("GET", "/admin/keys/audit"): Operation(_KEYS, "Who made and revoked keys", "keys.md"),
    ("DELETE", "/admin/keys/{id}"): Operation(_KEYS, "Revoke a key", "keys.md"),
}


_KEY = "key"

_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"message": TEXT, "type": TEXT, "param": {"type": ["string", "null"]}, "code": TEXT},
        }
    },
}


def describe_api() -> dict[str, Any]:
    """The whole description, as GET /openapi.json answers it."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        scopes = scopes_of(method, path)
        needs = f"A key with the scope {' or '.join(f'`{each}`' for each in scopes)}." if scopes else "No key."
        words = path.replace("{", "").replace("}", "").strip("/").replace(".", "_")
        in_path = [each.partition("}")[0] for each in path.split("{")[1:]]
        parameters = [_parameter(name, "path", TEXT) for name in in_path]
        parameters += [_parameter(name, "query", schema) for name, schema in operation.query.items()]
        content: dict[str, Any] = {"application/json": {}}
        if operation.streams:
            content["text/event-stream"] = {}
        error = {
            "description": "refused",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        described: dict[str, Any] = {
            "operationId": "_".join([method.lower(), *words.split("/")]),
            "tags": [operation.group],
            "summary": operation.summary,
            "description": needs,
            "externalDocs": {"url": f"docs/{operation.guide}"},
            "parameters": parameters,
            "responses": {"200": {"description": "OK", "content": content}, "default": error},
            "security": [] if required_scopes(method, path) == OPEN else [{_KEY: []}],
        }
        if operation.body is not None:
            required = bool(operation.body.get("required"))
            schema: Mapping[str, Any] = {"application/json": {"schema": operation.body}}
            described["requestBody"] = {"required": required, "content": schema}
        paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tuneloop",
            "version": VERSION,
            "description": "An OpenAI-compatible proxy that trains the model behind it.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer"}},
        },
    }


def scopes_of(method: str, path: str) -> list[str]:
    """The scopes of which a key needs one; none: no key is needed."""
    return sorted(scope.value for scope in required_scopes(method, path))


def _parameter(name: str, place: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}
