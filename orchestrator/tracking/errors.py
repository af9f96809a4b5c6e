"""Errors of a tracking store, and addresses without their secrets."""

from __future__ import annotations

import re

_REFUSALS = (
    "INVALID_PARAMETER_VALUE",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "BAD_REQUEST",
    "INVALID_STATE",
)
"""Answers of a store that a retry would not change."""
_TEMPORARY = (401, 403, 408, 429)
"""Client errors over HTTP that pass: of a login that is renewed, and of too many requests."""
_SECRETS = "token|key|secret|passw|sig|credential|auth"


class TrackingError(ValueError):
    """A tracking store that cannot be used.

    The message names its address (without credentials) and the remedy.
    """


def redact(text: str) -> str:
    """Hide user information of URIs, and values of parameters that are named like a secret."""
    text = re.sub(r"(?<=://)[^/\s]+@", "***@", text)
    # The password of a database may have a slash
    database = r"((?:postgres|mysql|mariadb|mssql|oracle)[\w+]*://)[^\s/:@]*:\S*@"
    text = re.sub(database, r"\1***@", text)
    parameter = rf"([?&;][\w.-]*(?:{_SECRETS})[\w.-]*=)[^&;\s'\"]+"
    return re.sub(parameter, r"\1***", text, flags=re.IGNORECASE)


def is_away(error: Exception) -> bool:
    """Return whether a store could not be reached or failed; False if it refused the request."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code not in _REFUSALS
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in _TEMPORARY
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or package in ("requests", "urllib3", "sqlalchemy")
