"""What an engine says of itself by which one start of it is told from another."""

import re

#: The metric that says when the process began that answers, in seconds since 1970. Of several API servers none has it.
START_TIME = "process_start_time_seconds"


def start_time(metrics: str) -> str | None:
    """When the engine's only API server began, by its metrics."""
    found = re.search(rf"^{START_TIME} (\S+)$", metrics, re.MULTILINE)
    return found and found[1]


def instance_id(server_info: str) -> str | None:
    """The engine's id, by its `/server_info` as JSON; of several API servers each has one of its own, which is none."""
    servers = re.search(r'"_api_process_count": ?(\d+)', server_info)
    found = re.search(r'"instance_id": ?"([^"]+)"', server_info)
    return found[1] if found and not (servers and int(servers[1]) > 1) else None
