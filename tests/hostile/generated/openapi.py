"""The service's own OpenAPI description with the pages, for what generates requests from it."""

from typing import Any

from tuneloop.explorer.routes.api_operations import describe_api

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}


def _body(properties: Json, *required: str) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


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
