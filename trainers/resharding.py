"""A training checkpoint of ZeRO 1 to 3 for another number of workers: DeepSpeed's universal form, a file a parameter.

Checkpoints are written as they always are, each worker its own share. Only where the number of workers has changed is
one made into the other form, beside it, and removed once all have read it. Its maker holds one worker's old share at a
time; on the disk the other form takes as much as the checkpoint.
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
from trainers.jobs.checkpoints import gathered

_POLL_SECONDS = 0.5


@contextlib.contextmanager
def for_any_number(
    folder: str | Path, tag: str, make: Callable[[Path, Path], None]
) -> Iterator[Path]:
    """While the body runs: the checkpoint `tag` in `folder`, as a folder that any number of workers can load it from.
    `make(source, target)` writes the other form.

    All workers must enter and leave it together. Rank 0 makes it, and the first worker of each node that does not see
    what rank 0 has made. Raises OSError on all workers if one of them could not.
    """
    folder = Path(folder)
    host = socket.gethostname()
    own = folder.parent / f".{folder.name}-any-{host}"
    hosts = _gathered(host)
    if dist.get_rank() == 0:
        shutil.rmtree(own, ignore_errors=True)  # of a worker that was killed
        own.mkdir()
    first = _gathered(str(own))[0]
    places = _gathered(first if Path(first).is_dir() else str(own))
    place = Path(places[hosts.index(host)])  # that of the node's first worker
    made: Future[None] | None = None
    if dist.get_rank() == places.index(str(place)):
        worker = ThreadPoolExecutor(1, "headfold-resharding")
        made = worker.submit(make, folder / tag, place / tag)
        worker.shutdown(wait=False)
    try:
        problem = next(filter(None, _outcomes(made)), None)
        if problem:
            raise OSError(
                f"training checkpoint {folder} cannot be split over {len(hosts)} workers: {problem}"
            )
        yield place
        _gathered(None)
    finally:
        if made is not None:
            shutil.rmtree(place, ignore_errors=True)


def _outcomes(made: Future[None] | None) -> list[str | None]:
    """What went wrong, by rank, once all have finished; None where nothing did."""
    while True:
        with contextlib.suppress(TimeoutError):
            if made is not None:
                made.exception(_POLL_SECONDS)
        if all(_gathered(made is None or made.done())):
            error = made.exception() if made is not None else None
            return _gathered(None if error is None else reason(error))


def _gathered(value: Any) -> list[Any]:
    return gathered(value, dist.get_world_size())
