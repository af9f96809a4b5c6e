"""Names of dtypes: one vocabulary for command line, configuration and records. Imports no torch."""

from __future__ import annotations

from typing import Any

SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def full_name(name: Any) -> Any:
    """Return the long name of a dtype, `bfloat16` for `bf16`; any other name is unchanged."""
    return SHORT_DTYPES.get(name, name) if isinstance(name, str) else name
