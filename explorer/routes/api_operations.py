"""What each route does, takes and answers, as tables, and the OpenAPI 3.1 description that is made of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tuneloop.explorer.auth import OPEN, required_scopes
from tuneloop.shared import VERSION

Schema = Mapping[str, Any]

#: By group: each route, the file of docs/ that explains it, and its summary.
_ROUTES = """\
Replies
POST /v1/chat/completions | clients | Answer a conversation. The reply is recorded; its `id` is what feedback names
POST /v1/completions | clients | Continue a text
POST /v1/responses | clients#responses | Answer in OpenAI's Responses format
POST /v1/messages | clients#messages | Answer in Anthropic's Messages format
POST /v1/messages/count_tokens | clients#messages | Count the tokens of a conversation
POST /tokenize | clients | The token ids of a text, or of a conversation's prompt
POST /detokenize | clients | The text of token ids
GET /tokenizer_info | clients | The tokenizer's properties
GET /v1/models | clients | The models, and the versions that clients may choose
GET /v1/models/{model} | clients | One model

Files and graders
POST /v1/files | files | Upload a file, as multipart/form-data: `file`, `purpose`, `expires_after[…]`
GET /v1/files | files | Files, newest first
GET /v1/files/{id} | files | One file
GET /v1/files/{id}/content | files | A file's content
DELETE /v1/files/{id} | files | Delete a file
POST /v1/uploads | files | Start a file in parts
POST /v1/uploads/{id}/parts | files | Send a part, as multipart/form-data: `data`
POST /v1/uploads/{id}/complete | files | Make the file of its parts
POST /v1/uploads/{id}/cancel | files | Cancel an upload
POST /v1/fine_tuning/alpha/graders/validate | files | Check a grader
POST /v1/fine_tuning/alpha/graders/run | files | Grade a reply

Fine-tuning
DELETE /v1/models/{model} | files#fine-tuning-jobs | Delete the model of a fine-tuning job
POST /v1/fine_tuning/jobs | files#fine-tuning-jobs | Start a job that trains on a file
GET /v1/fine_tuning/jobs | files#fine-tuning-jobs | Jobs, newest first
GET /v1/fine_tuning/jobs/{id} | files#fine-tuning-jobs | One job
GET /v1/fine_tuning/jobs/{id}/events | files#fine-tuning-jobs | A job's events, newest first
GET /v1/fine_tuning/jobs/{id}/checkpoints | files#fine-tuning-jobs | A job's versions, newest first
POST /v1/fine_tuning/jobs/{id}/{action} | files#fine-tuning-jobs | `cancel`, `pause` or `resume` a job

Feedback
POST /feedback | feedback | Rate replies
POST /api/public/scores | feedback | A Langfuse score, or a list of them, as feedback
DELETE /api/public/scores/{score_id} | feedback | Delete a Langfuse score
POST /api/public/ingestion | feedback | Langfuse's events; only scores are stored
POST /v1/feedback_tokens | keys | A token for feedback from a browser
POST /commit | feedback#commit | Release rewarded replies to the trainer

Stored replies
GET /v1/chat/completions | clients#stored-completions | Stored chats
GET /v1/chat/completions/{id} | clients#stored-completions | One stored chat
POST /v1/chat/completions/{id} | clients#stored-completions | Change the labels of a stored chat
DELETE /v1/chat/completions/{id} | clients#stored-completions | Delete a stored chat
GET /v1/chat/completions/{id}/messages | clients#stored-completions | The messages of a stored chat
GET /v1/chat/completions/{id}/explain | explain | What happened to a reply of any route, and what it waits for
GET /v1/responses/{id} | clients#responses | A stored response

Training
GET /training | troubleshooting#doctor | The served version, waiting replies, and reasons
GET /training/calls | troubleshooting#doctor | The number of a run's recorded calls, and their tokens

Service
GET /metrics | metrics | Metrics, in Prometheus' format or as JSON
GET /health | one_machine#monitoring | The service lives
GET /health/live | one_machine#monitoring | The service lives
GET /api/hello | clients#messages | The service lives
GET /health/ready | one_machine#monitoring | An engine answers, disk and database store records
GET /ping | one_machine#monitoring | An engine answers
POST /ping | one_machine#monitoring | An engine answers
GET /version | one_machine#monitoring | The engine's release
GET / | clients | Links, for browsers and as JSON
GET /docs | clients | This description, for browsers
GET /openapi.json | clients | This description, for programs

Versions
GET /admin/versions | versions | All versions of the weights
GET /admin/versions/{version} | versions | One version
GET /admin/versions/events | versions | Decisions about versions
GET /admin/versions/compare | versions | Compare two versions
POST /admin/versions/{version}/pin | versions | Serve this version until it is unpinned
POST /admin/versions/unpin | versions | Serve the champion again
POST /admin/versions/{version}/promote | versions | Make a candidate the champion
POST /admin/versions/{version}/reject | versions | Never serve this candidate, or retired version
POST /admin/versions/rollback | versions | Return to the previous champion
POST /admin/versions/{version}/rollback | versions | Never serve this version again
POST /admin/versions/{version}/unpin | versions | Serve the champion of this version's policy again
GET /admin/policies | policies | Policies, a line each
POST /admin/policies | policies | Make a policy
POST /admin/policies/{name}/{action} | policies | `pause`, `resume`, `delete` a policy, or `promote` its champion

Keys and raters
GET /admin/raters | feedback | Raters, with quarantines
GET /admin/keys | keys | Keys, without their secrets
POST /admin/keys | keys | Make a key
GET /admin/keys/audit | keys | Creations and revocations of keys
DELETE /admin/keys/{id} | keys | Revoke a key
"""

#: The fields of bodies: `name:kind`, where `!` marks what is required, and `...` that others are passed on.
_SAMPLING = "model:model temperature:number top_p:number stream:flag metadata:labels"
_ENTRY = (
    "msg_ids:ids task_id:task run_id:name reward:reward metric:metric value:score label comment demonstration:answer"
    " preferred_over:worse retract:retract source:source time:time idempotency_key:key"
)
_DECISION = "reason:reason by:name expect:integer"
_REASONED = _DECISION.replace("reason:", "reason!:")
_BODIES: Mapping[str, str] = {
    "POST /v1/chat/completions": f"{_SAMPLING} messages!:messages tools:tools max_tokens:integer n:integer ...",
    "POST /v1/completions": f"{_SAMPLING} prompt!:any max_tokens:integer n:integer ...",
    "POST /v1/responses": f"{_SAMPLING} input!:any instructions previous_response_id tools:tools ...",
    "POST /v1/messages": f"{_SAMPLING} messages!:messages system:any max_tokens!:integer ...",
    "POST /v1/messages/count_tokens": "messages!:messages ...",
    "POST /tokenize": "prompt messages:messages ...",
    "POST /detokenize": "tokens!:integers",
    "POST /v1/uploads": "bytes!:integer filename! mime_type! purpose! expires_after:object",
    "POST /v1/uploads/{id}/complete": "part_ids!:texts md5",
    "POST /v1/fine_tuning/alpha/graders/validate": "grader!:object",
    "POST /v1/fine_tuning/alpha/graders/run": "grader!:object item:object model_sample!",
    "POST /v1/fine_tuning/jobs": (
        "model!:base training_file! validation_file method:object suffix seed:integer metadata:pairs"
    ),
    "POST /feedback": f"{_ENTRY} feedback:entries",
    "POST /api/public/scores": "id name dataType comment traceId:trace value:value ...",
    "POST /api/public/ingestion": "batch!:items",
    "POST /v1/feedback_tokens": "msg_id! source:name expires_in:seconds max_events:integer",
    "POST /commit": "task_id:name run_id:name task_ids:names time_threshold:number",
    "POST /v1/chat/completions/{id}": "metadata!:pairs",
    "POST /admin/versions/{version}/pin": _DECISION,
    "POST /admin/versions/unpin": _DECISION,
    "POST /admin/versions/{version}/unpin": _DECISION,
    "POST /admin/versions/{version}/promote": _DECISION,
    "POST /admin/versions/{version}/reject": _REASONED,
    "POST /admin/versions/rollback": _REASONED,
    "POST /admin/versions/{version}/rollback": _REASONED,
    "POST /admin/policies": "name!:name tenant:name parent options:object",
    "POST /admin/policies/{name}/{action}": "tenant:name into:name",
    "POST /admin/keys": "name!:name scopes:texts tenant:name limits:object expires_in:number policy:name",
}

#: The same of queries.
_PAGE = "limit:integer order:order after"
_QUERIES: Mapping[str, str] = {
    "GET /v1/files": f"{_PAGE} purpose",
    "GET /v1/fine_tuning/jobs": "after limit:integer metadata[k]",
    "GET /v1/fine_tuning/jobs/{id}/events": "after limit:integer",
    "GET /v1/fine_tuning/jobs/{id}/checkpoints": "after limit:integer",
    "GET /v1/chat/completions": f"{_PAGE} model",
    "GET /v1/chat/completions/{id}/messages": _PAGE,
    "GET /training/calls": "task_id:name run_id:name tokens:flag",
    "GET /admin/versions/events": "last:integer version:integer",
    "GET /admin/versions/compare": "a:integer b:integer",
}

_STREAMED = frozenset(f"POST /v1/{each}" for each in ("chat/completions", "completions", "responses", "messages"))

_TEXT, _NAME, _SCORE = {"type": "string"}, {"type": "string", "maxLength": 256}, {"type": ["number", "boolean"]}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"message": _TEXT, "type": _TEXT, "param": {"type": ["string", "null"]}, "code": _TEXT},
        }
    },
}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


#: The kinds of fields; the second of a pair is what is meant.
_KINDS: Mapping[str, Schema | tuple[Schema, str]] = {
    **{each: {"type": each} for each in ("number", "integer", "object")},
    "": _TEXT,
    "any": {},
    "flag": {"type": "boolean"},
    "name": _NAME,
    "names": _list_of(_NAME),
    "texts": _list_of(_TEXT),
    "integers": _list_of({"type": "integer"}),
    "items": _list_of({}),
    "tools": _list_of({"type": "object"}),
    "messages": _list_of(
        {"type": "object", "properties": {"role": _TEXT, "content": {}}, "required": ["role"]}
        | {"additionalProperties": True}
    ),
    "order": {"enum": ["asc", "desc"]},
    "pairs": {"type": "object", "additionalProperties": _TEXT},
    "score": _SCORE,
    "value": {"type": ["number", "boolean", "string"]},
    "model": (_TEXT, "As GET /v1/models lists it, or any other name if one model is served."),
    "base": (_TEXT, "The model, `model@version`, a policy, or what a job has made."),
    "labels": (
        {"type": "object"},
        "Labels, kept with the reply: `tuneloop_task_id`, `tuneloop_run_id`, `tuneloop_user`, `tuneloop_priority`,"
        " `train` (false: never trained on), and your own.",
    ),
    "ids": (_list_of(_TEXT), "Ids of replies; `<id>:<n>` is one choice of several."),
    "task": (_NAME, "With `run_id` and without `msg_ids`: a whole run."),
    "reward": (_SCORE, "What the replies are worth."),
    "metric": (_NAME, "The name under which `value` is stored."),
    "answer": (_TEXT, "The answer that should have been given."),
    "worse": (_TEXT, "The id of the reply to the same prompt that is worse."),
    "retract": ({"type": "boolean"}, "Take back what the same source said before."),
    "source": (_NAME, "Who says so: a rater, a rule, a judge."),
    "time": ({"type": ["number", "string"]}, "When it was said: seconds since 1970, or ISO 8601."),
    "key": (_NAME, "The same key twice counts once."),
    "trace": (_NAME, "The id of a reply, or a name that its request carried."),
    "seconds": ({"type": "number"}, "Seconds."),
    "reason": (_TEXT, "One line, kept with the event."),
}


def _schema_of(fields: str) -> Schema:
    properties, required = dict[str, Schema](), list[str]()
    for word in fields.split():
        name, _, kind = word.partition(":")
        if name.endswith("!"):
            required.append(name := name[:-1])
        if name == "...":
            continue
        if kind == "entries":
            properties[name] = {**_list_of(_schema_of(_ENTRY)), "description": "Several entries at once."}
        else:
            found = _KINDS[kind]
            properties[name] = {**found[0], "description": found[1]} if isinstance(found, tuple) else found
    more = {"additionalProperties": True} if fields.endswith("...") else {}
    return {"type": "object", "properties": properties, **({"required": required} if required else {}), **more}


class Operation(NamedTuple):
    """A route. `guide` is the file of docs/ that explains it, `scopes` those of which a key needs one, if any."""

    method: str
    path: str
    guide: str
    summary: str
    query: Mapping[str, Schema]
    body: Schema | None
    streams: bool
    scopes: list[str]


def _operation(row: str) -> Operation:
    name, guide, summary = row.split(" | ")
    (method, path), fields = name.split(), _BODIES.get(name)
    query = _schema_of(_QUERIES.get(name, ""))["properties"]
    scopes, body = sorted(each.value for each in required_scopes(method, path)), fields and _schema_of(fields)
    page, mark, anchor = guide.partition("#")
    guide = f"{page}.md{mark}{anchor}"
    return Operation(method, path, guide, summary, query, body or None, name in _STREAMED, scopes)


#: The operations by group.
OPERATIONS: Mapping[str, list[Operation]] = {
    group: [_operation(row) for row in rows]
    for group, *rows in (each.strip().splitlines() for each in _ROUTES.split("\n\n"))
}

_KEY = "key"


def describe_api() -> dict[str, Any]:
    paths = dict[str, dict[str, Any]]()
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for group, operations in OPERATIONS.items():
        for method, path, guide, summary, query, body, streams, scopes in operations:
            words = path.replace("{", "").replace("}", "").strip("/").replace(".", "_")
            parameters = [_parameter(each.partition("}")[0], "path", _TEXT) for each in path.split("{")[1:]]
            parameters += [_parameter(name, "query", schema) for name, schema in query.items()]
            types = ["application/json", "text/event-stream"][: 1 + streams]
            described = {
                "operationId": "_".join([method.lower(), *words.split("/")]),
                "tags": [group],
                "summary": summary,
                "description": f"A key with the scope {' or '.join(map('`{}`'.format, scopes))}."
                if scopes
                else "No key.",
                "externalDocs": {"url": f"docs/{guide}"},
                "parameters": parameters,
                "responses": {
                    "200": {"description": "OK", "content": {each: {} for each in types}},
                    "default": {"description": "refused", "content": refusal},
                },
                "security": [] if required_scopes(method, path) == OPEN else [{_KEY: []}],
            }
            if body is not None:
                schema = {"application/json": {"schema": body}}
                described["requestBody"] = {"required": bool(body.get("required")), "content": schema}
            paths.setdefault(path, {})[method.lower()] = described
    about = "An OpenAI-compatible proxy that trains the model behind it."
    return {
        "openapi": "3.1.0",
        "info": {"title": "tuneloop", "version": VERSION, "description": about},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer"}},
        },
    }


def _parameter(name: str, place: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}
