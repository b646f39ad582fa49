"""Whether a JSON value has a shape: the part of JSON Schema that formats of replies need."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_KINDS: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}

_SILENT = frozenset({"title", "description", "default", "examples", "$schema"})


def fits(value: object, schema: Mapping[str, Any]) -> bool:
    """Whether the value fits. Raises ValueError for a keyword that is not known here: it would be left unchecked.

    Known: type, enum, const, properties, required, additionalProperties (true or false), items, minItems, maxItems,
    minLength, maxLength, minimum, maximum, and those that only describe.

    >>> fits({"x": 1}, {"type": "object", "properties": {"x": {"type": "integer", "minimum": 2}}})
    False
    """
    for name, nested in _nested_schemas(schema):
        if not isinstance(nested, Mapping):
            raise ValueError(f"schema: {name} must be an object")
        fits(None, nested)  # for its keywords, whatever the value has
    unknown = sorted(schema.keys() - _CHECKS.keys() - _SILENT)
    if unknown:
        raise ValueError(f"schema: keywords that are not known: {', '.join(unknown)}")
    # All of them, so that a keyword that makes no sense is refused whatever the value.
    return all([_CHECKS[name](value, wanted, schema) for name, wanted in schema.items() if name in _CHECKS])


def _nested_schemas(schema: Mapping[str, Any]) -> Sequence[tuple[str, object]]:
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ValueError("schema: properties must be an object")
    return [*properties.items(), *([("items", schema["items"])] if "items" in schema else [])]


def _type(value: object, wanted: Any, _: Mapping[str, Any]) -> bool:
    kinds = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(kinds, Sequence) or any(each not in _KINDS for each in kinds):
        raise ValueError(f"schema: type: {wanted!r}")
    return any(_is(value, each) for each in kinds)


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _KINDS[kind])


def _properties(value: object, wanted: Any, _: Mapping[str, Any]) -> bool:
    return not isinstance(value, dict) or all(fits(value[name], wanted[name]) for name in value.keys() & wanted.keys())


def _required(value: object, wanted: Any, _: Mapping[str, Any]) -> bool:
    return not isinstance(value, dict) or all(name in value for name in wanted)


def _additional(value: object, wanted: Any, schema: Mapping[str, Any]) -> bool:
    if not isinstance(wanted, bool):
        raise ValueError("schema: additionalProperties must be true or false")
    return wanted or not isinstance(value, dict) or value.keys() <= schema.get("properties", {}).keys()


def _items(value: object, wanted: Any, _: Mapping[str, Any]) -> bool:
    return not isinstance(value, list) or all(fits(each, wanted) for each in value)


def _equal(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _size(kind: type, holds: Callable[[int, int], bool]) -> Callable[[object, Any, Mapping[str, Any]], bool]:
    return lambda value, wanted, _: not isinstance(value, kind) or holds(len(value), wanted)  # type: ignore[arg-type]


def _bound_check(holds: Callable[[float, float], bool]) -> Callable[[object, Any, Mapping[str, Any]], bool]:
    return lambda value, wanted, _: (
        isinstance(value, bool) or not isinstance(value, int | float) or holds(value, wanted)
    )


_CHECKS: Mapping[str, Callable[[object, Any, Mapping[str, Any]], bool]] = {
    "type": _type,
    "enum": lambda value, wanted, _: any(_equal(value, each) for each in wanted),
    "const": lambda value, wanted, _: _equal(value, wanted),
    "properties": _properties,
    "required": _required,
    "additionalProperties": _additional,
    "items": _items,
    "minItems": _size(list, lambda size, bound: size >= bound),
    "maxItems": _size(list, lambda size, bound: size <= bound),
    "minLength": _size(str, lambda size, bound: size >= bound),
    "maxLength": _size(str, lambda size, bound: size <= bound),
    "minimum": _bound_check(lambda number, bound: number >= bound),
    "maximum": _bound_check(lambda number, bound: number <= bound),
}
