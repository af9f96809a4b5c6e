"""The worker pool of a search: groups of Ray Train workers that carry out one training job after another.

One actor, the pool (`orchestrator.cluster.worker_pool`), keeps the groups; each group is a Ray Train run of its own
whose workers ask the pool for jobs (`trainers.jobs.worker.serve_pool`). A trial leases a group for its job and is told
of every milestone. Groups start as leases need them, and end when they have been idle for long, when another shape is
wanted, when they fail, or with the pool. The pool belongs to the search's driver and everything else to the pool, so
that nothing outlives the driver. Here are the sides of the driver and of the trials.
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

from orchestrator.cluster.capacity import capacity, settled
from orchestrator.cluster.worker_pool import CLOSE_SECONDS, Pool
from orchestrator.config.schema import SearchConfig
from orchestrator.storage.paths import SearchFolder
from trainers.jobs.worker import TrainJob, job_metrics, run_training

logger = logging.getLogger(__name__)

PREFIX = "headfold-groups"
WAIT_SECONDS = 10.0
REUSED_BELOW = 1_000_000_000
"""Parameters from which on workers on GPUs are not kept from training to training (docs/trials.md)."""


class GroupError(RuntimeError):
    """A group of workers, or several in a row, failed at a job."""


class PoolGone(RuntimeError):
    """The worker pool has died, and with it its groups."""


def pool_of_search(
    config: SearchConfig, folder: SearchFolder, parameters: int
) -> contextlib.AbstractContextManager[str | None]:
    """The pool of a search of a model with so many parameters, by name; None where every training starts workers of its
    own."""
    reuse = config.resources.reuse_workers
    if reuse == "auto":
        reuse = not config.train.gpus_per_worker or parameters < REUSED_BELOW
    if not reuse:
        return contextlib.nullcontext()
    return open_pool(str(folder.train), idle_seconds=config.resources.idle_seconds)


@contextlib.contextmanager
def open_pool(storage_path: str, **seconds: float) -> Iterator[str]:
    """A pool for as long as the body runs; yields its name, by which every process of the Ray job finds it. In
    `storage_path` it removes all folders that begin with PREFIX. `seconds`: see `Pool`."""
    name = f"{PREFIX}-{uuid.uuid4().hex[:12]}"
    _clear(storage_path)  # of a driver that was killed
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"name": name, "num_cpus": 0, "max_concurrency": 10_000, "scheduling_strategy": here}
    pool: Any = ray.remote(Pool).options(**options).remote(name, storage_path, **seconds)
    ray.get(pool.open.remote())
    try:
        yield name
    finally:
        with contextlib.suppress(Exception):
            ray.get(pool.close.remote(), timeout=2 * CLOSE_SECONDS)
        with contextlib.suppress(Exception):
            ray.kill(pool)
        _clear(storage_path)


def _clear(storage_path: str) -> None:
    """Remove the folders of groups; they hold nothing that is needed."""
    for folder in Path(storage_path).glob(f"{PREFIX}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def train(
    pool: str | None,
    job: TrainJob,
    on_report: Callable[[dict[str, Any]], None] = lambda report: None,
    callbacks: Callable[[], list[Any]] = list,
) -> dict[str, Any]:
    """`train_on_pool`; on workers of its own, with Ray Train's callbacks, if there is no pool, or no longer, or where
    workers come and go while they train."""
    if pool is not None and not job.shape.elastic:
        try:
            return train_on_pool(pool, job, on_report)
        except PoolGone as error:
            logger.warning("%s; %s goes on with workers of its own", error, job.run_name)
    if not job.shape.elastic:  # these lie where there is room for the next one
        job = replace(job, placement_strategy=settled(job.shape, capacity()).strategy)
    return run_training(job, callbacks=callbacks())


def train_on_pool(pool: str, job: TrainJob, on_report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """`run_training` on workers of the pool: the same job, reports and errors.

    `on_report` is called in this thread with each milestone's report; the workers wait until it returns, and if it
    raises they end the job there. Raises GroupError where `run_training` raises Ray's
    TrainingFailedError, and PoolGone if there is no pool, or no longer.
    """
    try:
        handle = ray.get_actor(pool)
        number, beat = cast(tuple[int, float], ray.get(handle.lease.remote(job.to_json())))
        with _leased(handle, number, beat):
            while True:
                event: Any = ray.get(handle.wait.remote(number, WAIT_SECONDS))
                if event is None:
                    continue
                if "report" in event:
                    on_report(event["report"])
                    ray.get(handle.go_on.remote(number))
                elif "ended" in event:
                    return job_metrics(job, event["ended"])
                else:
                    raise GroupError(event["failed"])
    except (RayActorError, ValueError) as error:
        if isinstance(error, ValueError) and "Failed to look up actor" not in str(error):
            raise
        raise PoolGone(f"the worker pool {pool} is gone: {error}") from None


@contextlib.contextmanager
def _leased(pool: Any, number: int, every: float) -> Iterator[None]:
    """Tell the pool that the holder lives, and in the end that it needs no more, however it ends."""
    ended = threading.Event()

    def tell() -> None:
        with contextlib.suppress(Exception):
            while not ended.wait(every):
                pool.alive.remote(number)

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        with contextlib.suppress(Exception):
            ray.get(pool.release.remote(number), timeout=WAIT_SECONDS)
