"""How a command line is read: the settings file may stand anywhere, and a mistake gets similar words."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from typer.core import TyperGroup

_FILE_ENDINGS = (".yaml", ".yml")
_CONFIG = "--config"


class CommandGroup(TyperGroup):
    """Commands that all take the settings file alike: `X.yaml`, `-c X.yaml` or `--config X.yaml`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is named, and its arguments. An unknown one is refused with what may have been meant."""
        if ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        if args[0] not in self.commands and not args[0].startswith("-"):
            word, root = args[0], ctx.find_root().command
            names = get_close_matches(word, self.commands)
            paths = {path: path.rpartition(" ")[2] for path in _paths(root)}
            names += [path for path, last in paths.items() if last == word and path not in names]
            names = names or [path for path, last in paths.items() if get_close_matches(word, [last], cutoff=0.8)]
            meant = (
                f". Did you mean {' or '.join(map(repr, names[:3]))}?" if names else "; tuneloop --help lists them all"
            )
            ctx.fail(f"there is no command {word!r}{meant}")
        name, command, rest = super().resolve_command(ctx, args)
        return name, command, name_settings_file(command, rest)


def name_settings_file(command: Any, arguments: Sequence[str]) -> list[str]:
    """Insert `--config` before a settings file that is given without it.

    The file is the first argument that is neither an option nor an option's value. If the command has arguments of its
    own, only a name with a YAML ending counts.
    """
    options = {flag: each for each in command.params for flag in each.opts if flag.startswith("-")}
    commands = getattr(command, "commands", {})
    has_arguments = bool(commands) or any(each.param_type_name == "argument" for each in command.params)
    if _CONFIG not in options or any(each.startswith((_CONFIG, "-c")) for each in arguments):
        return list(arguments)
    for index in _positions(arguments, options):
        if commands and arguments[index] in commands:
            break
        if not has_arguments or arguments[index].endswith(_FILE_ENDINGS):
            return [*arguments[:index], _CONFIG, *arguments[index:]]
    return list(arguments)


def _positions(arguments: Sequence[str], options: dict[str, Any]) -> Iterator[int]:
    is_value = False
    for index, argument in enumerate(arguments):
        if argument == "--":
            return
        if is_value:
            is_value = False
        elif argument.startswith("-") and argument != "-":
            is_value = argument in options and not getattr(options[argument], "is_flag", False)
        else:
            yield index


def _paths(group: Any, before: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _paths(command, f"{before}{name} ")
        else:
            yield f"{before}{name}"
