"""Work in Ray tasks, with progress shown by the driver.

The driver loads no weights, so its node needs no GPU and little memory.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from attention.base.progress import show_progress, stage
from orchestrator.cluster.ray_internals import delete_value, get_value, put_value

PUBLISH_SECONDS = 2.0

_T = TypeVar("_T")


def on_cluster(
    options: Mapping[str, Any], label: str, work: Callable[..., _T], *arguments: Any
) -> _T:
    """Return `work(*arguments)`, called in a Ray task; without Ray, in this process.

    A task that loses its node restarts on another. Exceptions of `work` are raised here.

    Args:
        options: Of the task (`orchestrator.cluster.placement.task_options`).
        label: Label of the line that shows its progress every few seconds.
    """
    if not ray.is_initialized():
        return work(*arguments)
    # On CPUs nothing else runs meanwhile: the task has the threads of this process
    threads = None if options["num_gpus"] else torch.get_num_threads()
    settings: dict[str, Any] = {**options, "max_retries": 3, "name": label or None}
    task: Any = ray.remote(**settings)(_run_work)
    key = uuid.uuid4().hex
    try:
        with stage(label) as progress:
            progress.detail = lambda: published_progress(key)
            return ray.get(task.remote(threads, key, work, arguments))
    except RayTaskError as error:
        raise error.cause from None  # without Ray's trace around what a user can mend


def each_on_cluster(
    options: Mapping[str, Any],
    label: str,
    work: Callable[..., _T],
    calls: Sequence[tuple[Any, ...]],
    most: int | None = None,
    unit: str = "models",
) -> Iterator[tuple[int, _T]]:
    """Yield the number and the result of each call of `work`, in the order in which they finish.

    Each is a separate Ray task that waits for no other; without Ray they run in this process, one
    after the other. An exception of `work` is raised here, and ends the others.

    Args:
        options: Of each task (`orchestrator.cluster.placement.task_options`).
        label: Label of the line that shows how many have finished, and the time left.
        calls: Arguments of each call.
        most: Tasks at a time; None: as many as there is room for.
        unit: What the line counts.
    """
    with stage(label, len(calls), unit) as progress:
        if not ray.is_initialized():
            for number, arguments in enumerate(calls):
                yield number, work(*arguments)
                progress.step()
            return
        at_once = min(len(calls), most or len(calls))
        threads = None if options["num_gpus"] else max(1, torch.get_num_threads() // at_once)
        task: Any = ray.remote(**options, max_retries=3)(_run_work)
        waiting = list(enumerate(calls))
        running: dict[Any, tuple[int, str]] = {}
        progress.detail = lambda: ", ".join(
            filter(None, (published_progress(key) for _, key in list(running.values())))
        )
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    number, arguments = waiting.pop(0)
                    key = uuid.uuid4().hex
                    running[task.remote(threads, key, work, arguments)] = (number, key)
                (reference, *_), _ = ray.wait(list(running), num_returns=1)
                number, _ = running.pop(reference)
                yield number, ray.get(reference)
                progress.step()
        except RayTaskError as error:
            raise error.cause from None
        finally:
            cancel_unfinished(list(running))


def cancel_unfinished(tasks: Sequence[Any]) -> None:
    """Stop the processes of unfinished tasks.

    Ray kills the process that force-cancels a finished task [2.60].

    Args:
        tasks: References to their results.
    """
    if not tasks:
        return
    _, unfinished = ray.wait(list(tasks), num_returns=len(tasks), timeout=0, fetch_local=False)
    for task in unfinished:
        with contextlib.suppress(RayError, ValueError):
            ray.cancel(task, force=True)


def _run_work(
    threads: int | None, key: str, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    if threads is not None:
        torch.set_num_threads(threads)
    with publish_progress(key, "at work"):
        return work(*arguments)


def run_task(options: Mapping[str, Any], function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, called in a Ray task outside the caller's placement group.

    The task ends with the caller, however that ends; one that loses its machine is retried once.

    Args:
        options: Of the task (`orchestrator.cluster.placement.task_options`).
    """
    # Without this strategy Tune puts all processes of a trial into the trial's own bundle
    remote = ray.remote(max_retries=1, scheduling_strategy="DEFAULT", **options)
    task: Any = remote(function)
    reference = task.remote(*arguments)
    try:
        return ray.get(reference)
    except BaseException:
        cancel_unfinished([reference])
        raise


@contextlib.contextmanager
def publish_progress(key: str, label: str) -> Iterator[None]:
    """While the body runs, publish the progress of this process to the cluster.

    Args:
        key: For `published_progress`.
        label: What the process does outside of stages.
    """
    if not ray.is_initialized():
        yield
        return
    try:
        with show_progress(label, partial(put_value, key), PUBLISH_SECONDS):
            yield
    finally:
        delete_value(key)


def published_progress(key: str) -> str:
    """Return the progress line that a process publishes under `key`; empty without one."""
    return get_value(key) if ray.is_initialized() else ""
