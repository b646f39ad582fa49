"""The service's routes as an OpenAPI description, from the tables of docs/, for what generates requests from it."""

from typing import Any

from tests.doubles.engine import CHAT, MODEL
from tuneloop.explorer.routes.api_operations import describe_api

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_NAME: Json = {"anyOf": [{"type": "string", "maxLength": 256}, {"type": "integer"}]}
_FLAG: Json = {"type": "boolean"}
_LABELS: Json = {
    "type": "object",
    "properties": {
        "tuneloop_task_id": _NAME,
        "tuneloop_run_id": _NAME,
        "tuneloop_priority": {"type": "number"},
        "tuneloop_user": _NAME,
        "train": {"enum": [True, False, "true", "false"]},
    },
}
_SAMPLING: Json = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "n": {"type": "integer", "minimum": 1, "maximum": 3},
    "seed": {"type": "integer"},
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 4}]},
    "logprobs": _FLAG,
    "user": _TEXT,
    "store": _FLAG,
    "metadata": _LABELS,
    "stream": _FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": _FLAG}},
}
_MODEL: Json = {"enum": [MODEL]}
_PARTS: Json = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"type": {"enum": ["text"]}, "text": _TEXT},
        "required": ["type", "text"],
    },
}
_FUNCTION: Json = {
    "type": "object",
    "properties": {"name": _TEXT, "description": _TEXT, "parameters": {"type": "object"}},
    "required": ["name"],
}


def _messages(*roles: str) -> Json:
    content = {"anyOf": [_TEXT, _PARTS]}
    message = {"properties": {"role": {"enum": roles}, "content": content}, "required": ["role", "content"]}
    return {"type": "array", "minItems": 1, "maxItems": 5, "items": {"type": "object"} | message}


def _body(properties: Json, *required: str) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


_TOOLS: Json = {
    "type": "array",
    "items": _body({"type": {"enum": ["function"]}, "function": _FUNCTION}, "type", "function"),
}
_ENTRY: Json = {
    "msg_ids": {"type": "array", "items": _TEXT, "minItems": 1},
    "reward": {"type": "number"},
    "value": {"anyOf": [{"type": "number"}, _FLAG, _TEXT]},
    "label": _TEXT,
    "comment": _TEXT,
    "demonstration": _TEXT,
    "preferred_over": _TEXT,
    "retract": _FLAG,
    "metric": _TEXT,
    "source": _TEXT,
    "task_id": _NAME,
    "run_id": _NAME,
    "time": {"anyOf": [{"type": "number"}, _TEXT]},
    "idempotency_key": _TEXT,
}

_BODIES: dict[str, Json] = {
    CHAT: _body(
        _SAMPLING
        | {
            "model": _MODEL,
            "messages": _messages("system", "user", "assistant"),
            "max_tokens": {"type": "integer", "minimum": 1},
            "tools": _TOOLS,
            "tool_choice": {"enum": ["auto", "none"]},
            "response_format": {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}},
        },
        "model",
        "messages",
    ),
    "/v1/completions": _body(
        _SAMPLING
        | {
            "model": _MODEL,
            "prompt": _TEXT,
            "max_tokens": {"type": "integer", "minimum": 1},
            "logprobs": {"type": "integer"},
        },
        "model",
        "prompt",
    ),
    "/v1/responses": _body(
        {
            "model": _MODEL,
            "input": {"anyOf": [_TEXT, _messages("user", "assistant", "system")]},
            "instructions": _TEXT,
            "previous_response_id": _TEXT,
            "tools": {
                "type": "array",
                "items": _FUNCTION | {"properties": _FUNCTION["properties"] | {"type": {"enum": ["function"]}}},
            },
            "max_output_tokens": {"type": "integer", "minimum": 1},
            "temperature": _SAMPLING["temperature"],
            "metadata": _LABELS,
            "store": _FLAG,
            "stream": _FLAG,
            "include": {"type": "array", "items": {"enum": ["message.output_text.logprobs"]}},
        },
        "model",
        "input",
    ),
    "/v1/messages": _body(
        {
            "model": _MODEL,
            "messages": _messages("user", "assistant"),
            "max_tokens": {"type": "integer", "minimum": 1},
            "system": _TEXT,
            "stop_sequences": {"type": "array", "items": _TEXT},
            "temperature": _SAMPLING["temperature"],
            "tools": {
                "type": "array",
                "items": _body({"name": _TEXT, "input_schema": {"type": "object"}}, "name", "input_schema"),
            },
            "metadata": {"type": "object", "properties": {"user_id": _TEXT}},
            "stream": _FLAG,
        },
        "model",
        "messages",
        "max_tokens",
    ),
    "/feedback": {
        "anyOf": [_body(_ENTRY), _body({"feedback": {"type": "array", "items": _body(_ENTRY), "maxItems": 5}})]
    },
    "/commit": _body(
        {
            "task_id": _NAME,
            "run_id": _NAME,
            "task_ids": {"type": "array", "items": _NAME},
            "time_threshold": {"type": "number"},
        }
    ),
    "/tokenize": _body({"model": _MODEL, "prompt": _TEXT}, "prompt"),
    "/detokenize": _body({"model": _MODEL, "tokens": {"type": "array", "items": {"type": "integer"}}}, "tokens"),
    CHAT + "/{id}": _body({"metadata": {"type": "object", "additionalProperties": _TEXT}}, "metadata"),
    "/admin/versions/{version}/pin": _body({"reason": _TEXT, "by": _TEXT}),
    "/admin/versions/{version}/promote": _body({"reason": _TEXT, "by": _TEXT, "expect": {"type": "integer"}}),
    "/admin/versions/{version}/reject": _body({"reason": _TEXT}, "reason"),
    "/admin/versions/rollback": _body({"reason": _TEXT}, "reason"),
    "/admin/versions/unpin": _body({"reason": _TEXT}),
}

_PAGE: Json = {"limit": {"type": "integer"}, "order": {"enum": ["asc", "desc"]}, "after": _TEXT}
_QUERIES: dict[str, Json] = {
    CHAT: _PAGE | {"model": _TEXT, "metadata[task_id]": _TEXT},
    CHAT + "/{id}": {},
    CHAT + "/{id}/messages": _PAGE,
    "/v1/responses/{id}": {"stream": _FLAG, "starting_after": {"type": "integer"}},
    "/v1/models": {},
    "/v1/models/{id}": {},
    "/health": {},
    "/health/ready": {},
    "/metrics": {},
    "/ping": {},
    "/version": {},
    "/training": {},
    "/training/calls": {"task_id": _TEXT, "run_id": _TEXT},
    "/admin/versions": {},
    "/admin/versions/events": {"last": {"type": "integer"}, "version": {"type": "integer"}},
    "/admin/versions/compare": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "/admin/versions/{version}": {},
}


def description() -> Json:
    """The whole description."""
    paths: Json = {}
    for path, schema in _BODIES.items():
        content = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(path, {})["post"] = _operation(path, {}) | {"requestBody": content}
    for path, query in _QUERIES.items():
        paths.setdefault(path, {})["get"] = _operation(path, query)
    paths[CHAT + "/{id}"]["delete"] = _operation(CHAT + "/{id}", {})
    return {"openapi": "3.1.0", "info": {"title": "tuneloop", "version": "0"}, "paths": paths}


#: The pages, which the service's own description leaves out.
_UI: dict[str, Json] = {
    "/ui": {},
    "/ui/login": {"next": _TEXT},
    "/ui/exchanges": {"after": _TEXT, "state": _TEXT, "version": _TEXT},
    "/ui/exchanges/{id}": {},
    "/ui/exchanges/{id}/tokens/{choice}": {},
    "/ui/versions": {},
    "/ui/versions/{version}": {},
    "/ui/versions/compare": {"a": _TEXT, "b": _TEXT},
    "/ui/preferences": {"after": _TEXT},
    "/ui/{page}": {},
}
_UI_FORMS: dict[str, Json] = {
    "/ui/login": _body({"key": _TEXT, "next": _TEXT}),
    "/ui/logout": _body({"token": _TEXT}),
    "/ui/exchanges/{id}/feedback": _body({"token": _TEXT, "value": _TEXT, "comment": _TEXT}),
    "/ui/preferences": _body({"token": _TEXT, "better": _TEXT, "worse": _TEXT}),
    "/ui/versions/{version}/{action}": _body({"token": _TEXT, "reason": _TEXT}),
}


def own_description() -> Json:
    """What the service says of itself, with the pages."""
    found = describe_api()
    for path, query in _UI.items():
        found["paths"].setdefault(path, {})["get"] = _operation(path, query)
    for path, form in _UI_FORMS.items():
        content = {"required": True, "content": {"application/json": {"schema": form}}}
        found["paths"].setdefault(path, {})["post"] = _operation(path, {}) | {"requestBody": content}
    return found


def _operation(path: str, query: Json) -> Json:
    in_path = [each.partition("}")[0] for each in path.split("{")[1:]]
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in in_path]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
    return {"parameters": parameters, "responses": {"200": {"description": "an answer"}}}
