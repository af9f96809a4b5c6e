"""Seconds of the phases of a verb, and times in words."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator


class Phases(dict[str, float]):
    """Seconds of each named phase: `with phases("plan"): ...`."""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds of the body to the phase `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.perf_counter() - started


def clock(seconds: float) -> str:
    """Return seconds as 1:05:09, or as 5:09 below an hour."""
    whole = max(0, round(seconds))
    hours = whole // 3600
    minutes = whole // 60 % 60
    rest = whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """Return seconds rounded for people: 42 s, 12 min, 3 h 20 min, 37 h."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    if not hours:
        return f"{minutes} min"
    return f"{hours} h {minutes} min" if hours < 10 and minutes else f"{round(seconds / 3600)} h"
