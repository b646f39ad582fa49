"""What a process tells and leaves when it fails: an error may quote what somebody has said."""

import resource

from tuneloop.shared.logging import clean_errors
from tuneloop.shared.privacy.detection import Detector
from tuneloop.shared.settings.feedback import PrivacySettings


def redact_crash_reports(settings: PrivacySettings) -> None:
    """Redact what errors tell from now on, by the patterns of the settings, and let nobody write a core file.

    That is for this process and those that it starts: a core file is all of the memory. Presidio is not asked.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    clean_errors(Detector(settings.model_copy(update={"presidio": ()})).redact)
