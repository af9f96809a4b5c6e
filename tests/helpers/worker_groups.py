"""Workers of a training without Ray: processes in one group of gloo, each returning what it found.

They are forked from a separate process, since a process group of the tests' would be theirs too.
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
def several_workers() -> Iterator[Callable[..., list[Any]]]:
    """`on_all(number, folder, work, *args)`: what `work(rank, *args)` of all returned, by rank. `folder` is empty or
    new; all of it must be known to pickle. Raises RuntimeError with a worker's traceback."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda number, folder, work, *args: pool.submit(_all, number, folder, work, args).result()


def _all(number: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    folder.mkdir(parents=True, exist_ok=True)
    answers = FORK.SimpleQueue()
    common = folder / "meeting", answers, work, args
    workers = [FORK.Process(target=_run, args=(rank, number, *common)) for rank in range(number)]
    for worker in workers:
        worker.start()
    result = {}
    while len(result) < number:
        rank, answer, failed = answers.get()
        if failed:
            for worker in workers:
                worker.kill()
            raise RuntimeError(f"worker {rank}: {failed}")
        result[rank] = answer
    for worker in workers:
        worker.join()
    return [result[rank] for rank in range(number)]


def _run(rank: int, number: int, meeting: Path, answers: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(number))
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=number, timeout=timedelta(seconds=60)
        )
        answers.put((rank, work(rank, *args), None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    os._exit(0)  # what the parent has registered for its own end is not the child's
