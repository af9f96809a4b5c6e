"""Names of dtypes: one vocabulary for command line, configuration and records. Imports no torch."""

from __future__ import annotations

from typing import Any

SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def full_name(name: Any) -> Any:
    """`bf16` -> `bfloat16`; whatever is no short name of a dtype comes back as it is."""
    return SHORT_DTYPES.get(name, name) if isinstance(name, str) else name
