"""Collecting what only refers to itself (models under hooks, DeepSpeed's engines), often and cheaply.

A full collection looks at every object of the process. After the imports of torch, transformers and DeepSpeed those are
more than a million, none of them garbage, and a look at all takes some 0.4 s: more than a step of a small model.
"""

from __future__ import annotations

import atexit
import gc

_USUAL = gc.get_threshold()
SELDOM = 50_000
"""New objects between two collections while libraries are imported: with Python's 700 these collections take a tenth of
the time of all imports."""

_settled = False


def collect_seldom() -> None:
    """Until `freeze_garbage`: call it before the imports."""
    gc.set_threshold(SELDOM, *_USUAL[1:])


def freeze_garbage() -> None:
    """Leave what is alive now out of later collections, for ever: call it after the imports and before models are made.
    Only the first call in a process does something."""
    global _settled
    if _settled:
        return
    _settled = True
    gc.freeze()
    gc.set_threshold(*_USUAL)
    atexit.register(gc.unfreeze)  # else libraries that look for leaks at the end find all of it
