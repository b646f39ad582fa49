"""Settings in which constants have other values, so that a test need not wait for them, in this process alone."""

from collections.abc import Mapping
from copy import deepcopy
from functools import reduce
from typing import Any, TypeVar

from tuneloop.shared.settings.settings import Settings, constants
from tuneloop.shared.settings.types import Section

S = TypeVar("S", bound=Section)


def settings_of(tree: Mapping[str, Any]) -> Settings:
    """The settings of a tree, in which constants may stand too."""
    return section_of(Settings, tree)


def section_of(kind: type[S], tree: Mapping[str, Any]) -> S:
    """A section of a tree, in which constants may stand too: an instance's own value hides that of its class."""
    values, hiding = deepcopy(dict(tree)), []
    for name, _ in constants(kind):
        *sections, last = name.split(".")
        section = reduce(lambda at, key: at.get(key) if isinstance(at, dict) else None, sections, values)
        if isinstance(section, dict) and last in section:
            hiding.append((sections, last, section.pop(last)))
    made = kind.model_validate(values)
    for sections, last, value in hiding:
        vars(reduce(getattr, sections, made))[last] = value
    return made
