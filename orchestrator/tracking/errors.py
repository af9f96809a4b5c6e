"""A store that cannot be used, and what may be said of its address."""

from __future__ import annotations

import re

REFUSED = (
    "INVALID_PARAMETER_VALUE",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "BAD_REQUEST",
    "INVALID_STATE",
)
"""Answers of a store that another try would get again."""
SECRETS = "token|key|secret|passw|sig|credential|auth"


class TrackingError(ValueError):
    """A tracking store that cannot be used. The message names its address (without credentials) and the remedy."""


def redact(text: str) -> str:
    """Hide the user information of every URI in a text, and the values of parameters that are named like a secret."""
    hidden = re.sub(r"(?<=://)[^/\s]+@", "***@", text)
    return re.sub(rf"([?&;][\w.-]*(?:{SECRETS})[\w.-]*=)[^&;\s'\"]+", r"\1***", hidden, flags=re.IGNORECASE)


def is_away(error: Exception) -> bool:
    """Whether a store could not be reached or could not work, as against having refused."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code not in REFUSED
    of = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or of in ("requests", "urllib3", "sqlalchemy")
