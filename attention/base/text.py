"""Numbers as tables and messages show them."""

from __future__ import annotations

import math


def number(value: float | None, form: str = ".3f") -> str:
    """Return a loss for a table; "-" where there is none."""
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def compact(count: float) -> str:
    """Return a count in three digits: 409600 -> 410k, 1500000 -> 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"


def gib(count: float) -> str:
    """Return bytes in GiB, e.g. 1.25 GiB."""
    return f"{count / 2**30:.2f} GiB"
