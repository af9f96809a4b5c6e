"""Collecting what only refers to itself (models under hooks, DeepSpeed's engines), often and cheaply.

A full collection looks at every object of the process. After the imports of torch, transformers and DeepSpeed those are
more than a million, none of them garbage, and a look at all takes some 0.4 s: more than a step of a small model.
"""

from __future__ import annotations

import atexit
import gc

_settled = False


def settle() -> None:
    """Leave what is alive now out of later collections, for ever: call it after the imports and before models are made.
    Only the first call in a process does something."""
    global _settled
    if _settled:
        return
    _settled = True
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries that look for leaks at the end find all of it
