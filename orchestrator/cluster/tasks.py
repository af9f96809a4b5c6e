"""Work that loads a model, as Ray tasks: the driver holds no weights, so its node needs no GPU and little memory."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import RayTaskError

from attention.base.progress import stage
from orchestrator.cluster.relay import progress_of, relayed

T = TypeVar("T")


def on_cluster(options: Mapping[str, Any], what: str, work: Callable[..., T], *arguments: Any) -> T:
    """`work(*arguments)` in a Ray task with these options (`placement.task_options`); raises what it raises.

    `what` names it in the line that says, every few seconds, how far it is. A task that loses its node starts again on
    another. Without Ray, as in a notebook, it is carried out in this process.
    """
    if not ray.is_initialized():
        return work(*arguments)
    # On CPUs nothing else runs meanwhile: it has the threads that this process would have
    threads = None if options["num_gpus"] else torch.get_num_threads()
    task: Any = ray.remote(**options, max_retries=3)(_carry_out)
    key = uuid.uuid4().hex
    try:
        with stage(what) as told:
            told.detail = lambda: progress_of(key)
            return ray.get(task.remote(threads, key, work, arguments))
    except RayTaskError as error:
        raise error.cause from None  # without Ray's trace around what a user can mend


def _carry_out(threads: int | None, key: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if threads is not None:
        torch.set_num_threads(threads)
    with relayed(key, "at work"):
        return work(*arguments)
