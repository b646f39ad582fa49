"""Opens the traces if the settings ask for them; OpenTelemetry is imported only then."""

from typing import TYPE_CHECKING

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.settings import Settings

if TYPE_CHECKING:
    from tuneloop.shared.telemetry.tracing import Tracing


def open_tracing(settings: Settings, service: str) -> "Tracing | None":
    """Where spans of a service go; None if unset. Raises EnvironmentRefused if the library is missing."""
    url = settings.monitor.otlp_url
    if url is None:
        return None
    try:
        from tuneloop.shared.telemetry.tracing import Tracing
    except ModuleNotFoundError as error:
        raise EnvironmentRefused(
            f"monitor.otlp_url: {error.name} is not installed here; pip install '.[tracing]' in tuneloop's folder, "
            "or leave the setting away"
        ) from None
    return Tracing(url, service=service, experiment=f"{settings.project}/{settings.name}")
