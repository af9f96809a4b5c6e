"""Independent small computations at the same time, a thread each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def map_on_threads(
    work: Callable[[_Item], _Result], items: Iterable[_Item], at_once: int | None = None
) -> list[_Result]:
    """Return `work(item)` of all items in their order, each computed on one thread of torch.

    A factorisation of a small matrix takes longer on several threads than on one, tens of times as
    long when other processes use the same cores, since its threads wait for each other.

    Args:
        work: The computation. It must be safe to run for several items at a time.
        items: Its arguments.
        at_once: Items at a time; none: as many as torch has threads.

    Raises:
        Exception: The first error of `work`, once the items that had begun have ended.
    """
    threads = torch.get_num_threads()
    workers = max(1, at_once or threads)
    try:
        # The number of threads is a thread's own, but new ones start with the last that was set.
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)
