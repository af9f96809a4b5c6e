"""Independent work on small layers at the same time, a thread each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import nn

from attention.base.threads import map_on_threads

Result = TypeVar("Result")

SMALL_LAYER = 4_000_000
"""Parameters of a layer up to which its operations are too short to be spread over threads
themselves; above it they are not, and several layers at a time would only take several times the
memory."""

ONE_AT_A_TIME = threading.Lock()
"""Lock for a pass through the whole model: the hooks on one layer see every pass through it."""


def largest(modules: Iterable[nn.Module]) -> int:
    """Return the number of parameters of the largest module."""
    return max(sum(p.numel() for p in module.parameters()) for module in modules)


def layers_at_once(count: int, parameters: int, device: torch.device) -> int:
    """Return how many of `count` layers of so many `parameters` are fitted at once.

    On the CPU as many as torch has threads, if a layer has at most `SMALL_LAYER` parameters; else
    one.
    """
    threads = torch.get_num_threads()
    return 1 if device.type != "cpu" or parameters > SMALL_LAYER else max(1, min(threads, count))


def each_layer(
    count: int, work: Callable[[int], Result], parameters: int, device: torch.device
) -> list[Result]:
    """Return `work(i)` of layers 0 to `count` - 1 in that order, whichever ends first.

    As many at a time as `layers_at_once` says, each on one thread; one at a time on all of them.
    The first error is raised once the layers that had begun have ended.
    """
    at_once = layers_at_once(count, parameters, device)
    if at_once == 1:
        return [work(i) for i in range(count)]
    return map_on_threads(work, range(count), at_once)
