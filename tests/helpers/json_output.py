"""The JSON that a script printed, among what libraries print."""

from __future__ import annotations

import contextlib
import json
from typing import Any


def last_json(output: str) -> Any:
    """Return the last line of an output that is an object or a list; Ray may print lines after it when it ends."""
    for line in reversed(output.splitlines()):
        if line.startswith(("{", "[")):
            with contextlib.suppress(json.JSONDecodeError):  # a log's date in brackets
                return json.loads(line)
    raise AssertionError(f"no JSON in {output[-2000:]!r}")
