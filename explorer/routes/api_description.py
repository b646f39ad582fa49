"""The service's API as an OpenAPI 3.1 description."""

from collections.abc import Mapping
from typing import Any

from tuneloop.explorer.auth import OPEN, required_scopes
from tuneloop.explorer.routes.api_operations import OPERATIONS, TEXT, Schema
from tuneloop.shared import VERSION

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
