"""A training checkpoint of ZeRO 1 to 3 for another number of workers.

DeepSpeed's universal form, a file per parameter.

Checkpoints are always written by each worker for its own share. Only where the number of workers
has changed is one converted to the other form, in a separate folder, and removed once all have read
it. The converting process loads as many old shares at a time as its CPUs and memory allow; on the
disk the other form takes as much as the checkpoint.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from attention.base.messages import reason
from trainers.jobs.checkpoints import gather_objects

_POLL_SECONDS = 0.5


@contextlib.contextmanager
def for_any_number(
    folder: str | Path, tag: str, make: Callable[[Path, Path], None]
) -> Iterator[Path]:
    """While the body runs.

    The checkpoint `tag` in `folder`, as a folder that any number of workers can load it from.
    `make(source, target)` writes the other form.

    All workers must enter and leave it together. Rank 0 makes it, and the first worker of each node
    that does not see what rank 0 has made.

    Raises:
        OSError: On all workers if one of them could not.
    """
    folder = Path(folder)
    host = socket.gethostname()
    own_folder = folder.parent / f".{folder.name}-any-{host}"
    hosts = _gathered(host)
    if dist.get_rank() == 0:
        shutil.rmtree(own_folder, ignore_errors=True)  # of a worker that was killed
        own_folder.mkdir()
    first = _gathered(str(own_folder))[0]
    folders = _gathered(first if Path(first).is_dir() else str(own_folder))
    folder_of_node = Path(folders[hosts.index(host)])  # that of the node's first worker
    writing: Future[None] | None = None
    if dist.get_rank() == folders.index(str(folder_of_node)):
        worker = ThreadPoolExecutor(1, "headfold-resharding")
        writing = worker.submit(make, folder / tag, folder_of_node / tag)
        worker.shutdown(wait=False)
    try:
        problem = next(filter(None, _outcomes(writing)), None)
        if problem:
            raise OSError(
                f"training checkpoint {folder} cannot be split over {len(hosts)} workers: {problem}"
            )
        yield folder_of_node
        _gathered(None)
    finally:
        if writing is not None:
            shutil.rmtree(folder_of_node, ignore_errors=True)


def _outcomes(writing: Future[None] | None) -> list[str | None]:
    """Return what went wrong, by rank, once all have finished; None where nothing did."""
    while True:
        with contextlib.suppress(TimeoutError):
            if writing is not None:
                writing.exception(_POLL_SECONDS)
        if all(_gathered(writing is None or writing.done())):
            error = writing.exception() if writing is not None else None
            return _gathered(None if error is None else reason(error))


def _gathered(value: Any) -> list[Any]:
    return gather_objects(value, dist.get_world_size())
