"""The worker pool of a search: groups of Ray Train workers that run one training job after another.

One actor, the pool (`orchestrator.cluster.worker_pool`), manages the groups; each group is a
separate Ray Train run whose workers request jobs from the pool (`trainers.jobs.worker.serve_pool`).
A trial leases a group for its job and receives the report of every milestone. Groups start as
leases need them, and end when they have been idle for long, when another shape is needed, when they
fail, or with the pool. The pool belongs to the search's driver and everything else to the pool, so
that nothing outlives the driver. This file has the parts of the driver and of the trials.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.capacity import cluster_nodes, resolve_strategy
from orchestrator.cluster.worker_pool import CLOSE_SECONDS, LeaseEvent, Pool
from orchestrator.config.schema import SearchConfig
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import RungReport
from trainers.jobs.worker import TrainJob, job_metrics, run_training

logger = logging.getLogger(__name__)

_FOLDER_PREFIX = "headfold-groups"
_WAIT_SECONDS = 10.0
REUSED_BELOW = 1_000_000_000
"""Parameters of a model from which on workers on GPUs are started for each training, see
docs/trials.md."""


class GroupError(RuntimeError):
    """A group of workers, or several in a row, failed at a job."""


class PoolGone(RuntimeError):
    """The worker pool has died, and with it its groups."""


def pool_of_search(
    config: SearchConfig, folder: SearchFolder, parameters: int
) -> contextlib.AbstractContextManager[str | None]:
    """Open the pool of a search.

    Args:
        parameters: Of the model.

    Returns:
        A context manager that yields the pool's name, or None if every training starts its own
        workers.
    """
    reuse = config.resources.reuse_workers
    if reuse == "auto":
        reuse = not config.train.gpus_per_worker or parameters < REUSED_BELOW
    if not reuse:
        return contextlib.nullcontext()
    return open_pool(str(folder.train), idle_seconds=config.resources.idle_seconds)


@contextlib.contextmanager
def open_pool(storage_path: str, **seconds: float) -> Iterator[str]:
    """Open a pool for as long as the body runs.

    Args:
        storage_path: Storage folder of the groups; all folders there that begin with
            `headfold-groups` are removed.
        seconds: See `Pool`.

    Yields:
        Its name, by which every process of the Ray job finds it.
    """
    name = f"{_FOLDER_PREFIX}-{uuid.uuid4().hex[:12]}"
    _remove_folders(storage_path)  # of a driver that was killed
    node_id = ray.get_runtime_context().get_node_id()
    actor: Any = ray.remote(Pool).options(
        name=name,
        num_cpus=0,
        max_concurrency=10_000,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    pool = actor.remote(name, storage_path, **seconds)
    ray.get(pool.open.remote())
    try:
        yield name
    finally:
        with contextlib.suppress(Exception):
            ray.get(pool.close.remote(), timeout=2 * CLOSE_SECONDS)
        with contextlib.suppress(Exception):
            ray.kill(pool)
        _remove_folders(storage_path)


def worker_groups(pool: str) -> int:
    """Return the number of groups of workers of a pool, starting and idle ones included.

    Raises:
        ValueError: If there is no such pool.
        RayError: If it does not answer.
    """
    state: Any = ray.get(ray.get_actor(pool).state.remote(), timeout=5)
    return len(state["groups"])


def _remove_folders(storage_path: str) -> None:
    """Remove the folders of groups; they contain nothing that is needed."""
    for folder in Path(storage_path).glob(f"{_FOLDER_PREFIX}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def dispatch_training(
    pool: str | None,
    job: TrainJob,
    on_report: Callable[[Any], None] = lambda report: None,
    callbacks: Callable[[], list[Any]] = list,
) -> RungReport:
    """Run a job on the pool, or on separate workers.

    Separate workers are for a search without a pool, after the pool has died, and if the number of
    workers changes during a training.

    Args:
        on_report: See `train_on_pool`.
        callbacks: Callbacks of Ray Train, for separate workers.

    Returns:
        The last report.
    """
    if pool is not None and not job.shape.elastic:
        try:
            return train_on_pool(pool, job, on_report)
        except PoolGone as error:
            logger.warning("%s; %s continues with its own workers", error, job.run_name)
    if not job.shape.elastic:  # elastic ones are placed where the next one has room
        strategy = resolve_strategy(job.shape, cluster_nodes()).strategy
        job = replace(job, placement_strategy=strategy)
    return cast(RungReport, run_training(job, callbacks=callbacks()))


def train_on_pool(pool: str, job: TrainJob, on_report: Callable[[Any], None]) -> RungReport:
    """Do what `run_training` does on workers of the pool: the same job, reports and errors.

    Args:
        on_report: Called in this thread with each milestone's report; the workers wait until it
            returns, and if it raises they end the job there.

    Returns:
        The last report.

    Raises:
        GroupError: Where `run_training` raises Ray's TrainingFailedError.
        PoolGone: If there is no pool, or no longer.
    """
    try:
        handle = ray.get_actor(pool)
        number, interval = cast(tuple[int, float], ray.get(handle.lease.remote(job.to_json())))
        with _leased(handle, number, interval):
            while True:
                event = ray.get(handle.wait.remote(number, _WAIT_SECONDS))
                if event is None:
                    continue
                event = cast(LeaseEvent, event)
                if event.error is not None:
                    raise GroupError(event.error)
                if event.outcome is not None:
                    return cast(RungReport, job_metrics(job, dict(event.outcome)))
                on_report(event.report)
                ray.get(handle.proceed.remote(number))
    except (RayActorError, ValueError) as error:
        if isinstance(error, ValueError) and "Failed to look up actor" not in str(error):
            raise
        raise PoolGone(f"the worker pool {pool} is gone: {error}") from None


@contextlib.contextmanager
def _leased(pool: Any, number: int, interval: float) -> Iterator[None]:
    """Send heartbeats to the pool every `interval` seconds, and release the lease in the end."""
    ended = threading.Event()

    def send_heartbeats() -> None:
        with contextlib.suppress(Exception):
            while not ended.wait(interval):
                pool.heartbeat.remote(number)

    threading.Thread(target=send_heartbeats, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        with contextlib.suppress(Exception):
            ray.get(pool.release.remote(number), timeout=_WAIT_SECONDS)
