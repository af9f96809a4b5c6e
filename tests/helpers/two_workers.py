"""Two workers of a training without Ray: processes in one group of gloo, each returning what it found.

They are forked from a process of their own, since a process group of the tests' would be theirs too.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FORK = multiprocessing.get_context("fork")


@contextmanager
def two_workers() -> Iterator[Callable[..., list[Any]]]:
    """`on_both(folder, work, *args)`: what `work(rank, *args)` of both returned, by rank. `folder` is empty or new;
    all of it must be known to pickle. Raises RuntimeError with a worker's traceback."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda folder, work, *args: pool.submit(_both, folder, work, args).result()


def _both(folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    folder.mkdir(parents=True, exist_ok=True)
    answers = FORK.SimpleQueue()
    workers = [FORK.Process(target=_run, args=(rank, folder / "meeting", answers, work, args)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    found = {}
    while len(found) < 2:
        rank, answer, failed = answers.get()
        if failed:
            for worker in workers:
                worker.kill()
            raise RuntimeError(f"worker {rank}: {failed}")
        found[rank] = answer
    for worker in workers:
        worker.join()
    return [found[0], found[1]]


def _run(rank: int, meeting: Path, answers: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
        )
        answers.put((rank, work(rank, *args), None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    os._exit(0)  # what the parent has registered for its own end is not the child's
