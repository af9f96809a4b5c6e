"""The JSON that a script printed, among what libraries print."""

from __future__ import annotations

import json
from typing import Any


def last_json(output: str) -> Any:
    """Return the last line of an output that is an object or a list; Ray may print lines after it when it ends."""
    lines = [line for line in output.splitlines() if line.startswith(("{", "["))]
    assert lines, f"no JSON in {output[-2000:]!r}"
    return json.loads(lines[-1])
