"""What a failure says, in one line."""

from __future__ import annotations

import re


def last_error(text: str) -> str:
    """The last line of a traceback that names an exception and says something; Ray's own wrappers come last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"([\w.]+\.)?\w*(Error|Exception|Diverged|Interrupt)\b.*: .", line)]
    own = [line for line in named if not line.startswith("ray.exceptions.")]
    return (own or named or lines or ["unknown error"])[-1][:1000]
