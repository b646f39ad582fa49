"""Runs the commands of the runner: `python -m tuneloop.runner COMMAND …`."""

import importlib
import sys
from collections.abc import Sequence

#: Modules of the commands, each with `main(argv) -> exit code`.
COMMANDS = {
    "debug": "tuneloop.runner.tuning.debugging",
    "shadow": "tuneloop.runner.shadow.shadow_command",
    "tasks": "tuneloop.runner.tasks.tasks_command",
    "tune": "tuneloop.runner.tuning.tune_command",
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print(f"usage: python -m tuneloop.runner {{{','.join(COMMANDS)}}} …", file=sys.stderr)
        return 0 if argv and argv[0] in {"-h", "--help"} else 2
    code: int = importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
