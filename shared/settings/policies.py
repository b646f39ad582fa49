"""The settings of a policy: those of the experiment, with the options that it has otherwise."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from tuneloop.shared.errors import PolicyRefused
from tuneloop.shared.settings.problems import dotted_name, sentences_of
from tuneloop.shared.settings.settings import Settings

#: What a policy may have of its own: whole sections, and single options.
_OWN = re.compile(
    r"(algorithm|rollout|gate)\..+|model\.lora\.(rank|alpha)|trainer\.(save_interval|max_staleness|total_steps|seed)"
    r"|buffer\.(commit|train_batch_size|batch_timeout|order|max_backlog|group_by|group_size|group_timeout|whole_groups_only)"
)


def settings_of_policy(settings: Settings, options: Mapping[str, Any]) -> Settings:
    """The settings with what a policy has otherwise, by dotted names. Raises PolicyRefused."""
    values = settings.model_dump(exclude_unset=True)
    values.get("algorithm", {}).pop("mix", None)  # beside the default policy's rows alone
    for name, value in options.items():
        if not _OWN.fullmatch(name):
            raise PolicyRefused(f"{name}: a policy has no such option of its own")
        *sections, key = name.split(".")
        section = values
        for each in sections:
            section = section.setdefault(each, {})
        section[key] = value
    try:
        found = Settings.model_validate(values)
    except ValidationError as error:
        sentences = [each for problem in error.errors(include_url=False) for each in sentences_of(problem)]
        raise PolicyRefused("; ".join(f"{dotted_name(keys)}: {what}" for keys, what in sentences)) from None
    return found
