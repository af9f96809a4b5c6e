"""The actor of the worker pool, which gives jobs to groups of workers.

See `orchestrator.cluster.pool_client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import PreemptionError

from orchestrator.cluster.capacity import (
    cluster_nodes,
    free_nodes,
    group_slots,
    resolve_strategy,
)
from orchestrator.cluster.ray_internals import cluster_status, pending_bundles
from orchestrator.cluster.session import last_error, ray_train_intervals
from orchestrator.storage.records import RungReport
from trainers.jobs.worker import TrainJob, serve_pool
from trainers.settings import Shape

CLOSE_SECONDS = 15.0
_SMALLEST_SHARE = 0.5  # of the CPUs of a worker, for a group that cannot start with all
_CHECK_SECONDS = 1.0
_START_FAILURES = 2  # in a row, after which waiting jobs fail
_NO_ROOM = "worker group startup timed out"  # what Ray Train says of nodes that have not come yet


@dataclass(frozen=True)
class LeaseEvent:
    """An event of a job: one of a milestone's report, its outcome, or an error."""

    report: RungReport | None = None
    outcome: Mapping[str, Any] | None = None
    error: str | None = None


@dataclass(eq=False)
class Group:
    """The pool's record of a group of workers.

    Attributes:
        started: On the monotonic clock, like `idle_since`.
        workers: Handles by rank.
        job: The number of the job under way in this group, and the job as JSON.
        jobs_done: The number of finished jobs.
        outcomes: Outcomes of the running job, by rank.
        reduced: Whether it takes less than its shape.
        placed_shape: The shape requested from Ray, once it was.
        changed: Set to wake waiting workers.
    """

    name: str
    shape: Shape
    started: float
    workers: dict[int, Any] = field(default_factory=dict)
    job: tuple[int, str] | None = None
    lease: Lease | None = None
    jobs_done: int = 0
    outcomes: dict[int, Any] = field(default_factory=dict)
    ready: bool = False
    ending: bool = False
    reduced: bool = False
    placed_shape: Shape | None = None
    idle_since: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def notify(self) -> None:
        """Wake the workers that wait."""
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(eq=False)
class Lease:
    """A job and its holder.

    Attributes:
        heartbeat_at: On the monotonic clock.
        reported_step: The last step whose report the holder has received.
        answer: The future that a group waits for after a report.
    """

    number: int
    job: TrainJob
    heartbeat_at: float
    reported_step: int = -1
    failures: int = 0
    group: Group | None = None
    events: asyncio.Queue[LeaseEvent] = field(default_factory=asyncio.Queue)
    answer: asyncio.Future[bool] | None = None
    released: bool = False

    @property
    def shape(self) -> Shape:
        """The workers that the job needs."""
        return self.job.shape

    @property
    def run(self) -> tuple[str, str]:
        """The checkpoints that the job writes."""
        return self.job.storage_path, self.job.run_name


@dataclass(eq=False)
class Pool:
    """The actor; all methods run in one event loop, `serve_pool` in one thread for each group.

    Attributes:
        idle_seconds: Seconds without a job, after which a group ends.
        lost_seconds: Seconds without a heartbeat, after which a lease's holder counts as dead.
        stuck_seconds: Seconds without any worker, after which a group may start on less CPU.
    """

    name: str
    storage_path: str
    idle_seconds: float = 300.0
    lost_seconds: float = 60.0
    stuck_seconds: float = 60.0

    def __post_init__(self) -> None:
        # Checking a group ten times per second would cost a few per cent of a core for nothing
        ray_train_intervals(health_check_seconds=0.5)
        self.groups: dict[str, Group] = {}
        self.leases: dict[int, Lease] = {}
        self.waiting: list[Lease] = []
        self._lease_numbers = itertools.count()
        self._group_numbers = itertools.count()
        self._start_failures = 0
        self._checks_with_pending_gpus = 0
        self._closing = False
        self._watcher: asyncio.Task | None = None
        self._self: Any = None

    async def open(self) -> None:
        """Start the watcher, once: it needs the event loop, which the constructor does not have."""
        self._self = ray.get_runtime_context().current_actor
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    # ---- for the holders of leases ---------------------------------------------------------------

    async def lease(self, job: str) -> tuple[int, float]:
        """Queue a job for a group.

        Args:
            job: As JSON.

        Returns:
            The number of the lease, and the seconds between its holder's heartbeats.
        """
        lease = Lease(next(self._lease_numbers), TrainJob.from_json(job), time.monotonic())
        self.leases[lease.number] = lease
        await self._release_others(lease)
        if not lease.released:
            self.waiting.append(lease)
            self._match()
        return lease.number, self.lost_seconds / 10

    async def _release_others(self, lease: Lease) -> None:
        """End other leases of the same run, whose holders have died; wait for their workers.

        Both would write the same checkpoints.
        """
        for other in list(self.leases.values()):
            if other is not lease and other.run == lease.run:
                await self.release(other.number)
        while not lease.released and any(
            group.lease not in (None, lease) and group.lease.run == lease.run
            for group in self.groups.values()
        ):
            lease.heartbeat_at = time.monotonic()  # its holder waits for this call
            await asyncio.sleep(0.05)

    async def wait(self, number: int, seconds: float) -> LeaseEvent | None:
        """Return the next event of a lease; None if there is none for `seconds`."""
        lease = self.leases.get(number)
        if lease is None:  # withdrawn, though its holder lives
            return LeaseEvent(
                error=f"nothing was heard from the trial for {self.lost_seconds:g} seconds, so its "
                "workers were released"
            )
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(lease.events.get(), seconds)

    async def heartbeat(self, number: int) -> None:
        """Record that the holder of a lease is alive."""
        if number in self.leases:
            self.leases[number].heartbeat_at = time.monotonic()

    async def proceed(self, number: int) -> None:
        """Let the workers continue after a report."""
        if (lease := self.leases.get(number)) is not None:
            self._answer(lease, True)

    async def release(self, number: int) -> None:
        """End a lease.

        A running job ends at the milestone where it waits, else with its workers.
        """
        lease = self.leases.pop(number, None)
        if lease is None:
            return
        lease.released = True
        if lease in self.waiting:
            self.waiting.remove(lease)
        if lease.group is None or self._answer(lease, False):
            return
        if lease.reported_step < lease.job.milestones[-1]:
            self._end(lease.group, kill=True)

    async def state(self) -> Mapping[str, Any]:
        """Return groups, leases and waiting jobs, for tests and for debugging."""
        groups = {
            group.name: {
                "shape": group.shape,
                "jobs": group.jobs_done,
                "busy": group.lease is not None,
            }
            for group in self._alive()
        }
        waiting = [lease.number for lease in self.waiting]
        return {"groups": groups, "leases": sorted(self.leases), "waiting": waiting}

    async def close(self) -> None:
        """End all groups; those that still run after CLOSE_SECONDS are killed."""
        self._closing = True
        for group in list(self.groups.values()):
            self._end(group, kill=group.lease is not None)  # nobody waits for what is under way
        deadline = time.monotonic() + CLOSE_SECONDS
        while self.groups and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for group in list(self.groups.values()):
            self._end(group, kill=True)
        if self._watcher is not None:
            self._watcher.cancel()

    # ---- for the groups' workers -----------------------------------------------------------------

    async def next(self, name: str, rank: int, number: int, worker: Any) -> str | None:
        """Return job `number` of a group as JSON once there is one; None to end."""
        group = self.groups.get(name)
        if group is not None and rank not in group.workers:
            group.workers[rank] = worker
            if len(group.workers) == group.shape.workers:
                group.ready = True
                group.idle_since = time.monotonic()
                self._start_failures = 0
                self._match()
        while group is not None and name in self.groups and not group.ending:
            if group.job is not None and group.job[0] == number:
                return group.job[1]
            await group.changed.wait()
        return None

    async def report(self, name: str, metrics: RungReport, last: bool) -> bool:
        """Pass rank 0's milestone to the holder, and wait for the answer unless it is the last.

        Returns: Whether the job continues.
        """
        lease = self.groups[name].lease
        if lease is None or lease.released:
            return False
        if metrics["step"] <= lease.reported_step:
            return True
        lease.reported_step = metrics["step"]
        if last:
            lease.events.put_nowait(LeaseEvent(report=metrics))
            return True
        lease.answer = asyncio.get_running_loop().create_future()
        lease.events.put_nowait(LeaseEvent(report=metrics))
        return await lease.answer

    async def finished(self, name: str, rank: int, outcome: Mapping[str, Any]) -> None:
        """Take the outcome of a job on one rank; rank 0's counts."""
        group = self.groups[name]
        group.outcomes[rank] = outcome
        if len(group.outcomes) < group.shape.workers:
            return
        lease = group.lease
        outcome = group.outcomes[0]
        group.lease = None
        group.job = None
        group.outcomes = {}
        group.idle_since = time.monotonic()
        group.jobs_done += 1
        if lease is not None and "failed" in outcome:
            self._fail(lease, outcome["failed"])
        elif lease is not None:
            lease.group = None
            lease.events.put_nowait(LeaseEvent(outcome=outcome))
        self._match()

    # ---- inside ----------------------------------------------------------------------------------

    def _alive(self) -> list[Group]:
        return [group for group in self.groups.values() if not group.ending]

    def _idle(self) -> list[Group]:
        return [group for group in self._alive() if group.ready and group.lease is None]

    def _match(self) -> None:
        """Give waiting jobs to idle groups of their shape, and start groups for the others."""
        for lease in list(self.waiting):
            group = next((group for group in self._idle() if group.shape == lease.shape), None)
            if group is not None:
                self.waiting.remove(lease)
                group.lease = lease
                lease.group = group
                group.job = (group.jobs_done, lease.job.to_json())
                group.notify()
        for shape in {lease.shape for lease in self.waiting}:
            waiting = sum(lease.shape == shape for lease in self.waiting)
            starting = sum(group.shape == shape and not group.ready for group in self._alive())
            for _ in range(waiting - starting):
                # Idle groups have another shape; they may occupy the room that this one needs
                for other in self._idle()[:1]:
                    self._end(other)
                self._start(shape)

    def _start(self, shape: Shape, reduced_shape: Shape | None = None) -> None:
        """Start a group.

        Args:
            reduced_shape: The shape requested from Ray, if that is less than `shape`.
        """
        if self._closing:
            return
        name = f"{self.name}-{next(self._group_numbers)}"
        group = Group(name, shape, time.monotonic(), reduced=reduced_shape is not None)
        self.groups[group.name] = group
        loop = asyncio.get_running_loop()

        def serve() -> None:
            error: BaseException | None = None
            try:
                group.placed_shape = reduced_shape or resolve_strategy(shape, cluster_nodes())
                serve_pool(self._self, group.name, group.placed_shape, self.storage_path)
            except BaseException as failure:
                error = failure
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._remove, group, error)

        threading.Thread(target=serve, name=group.name, daemon=True).start()

    def _end(self, group: Group, kill: bool = False) -> None:
        """End a group once its job is done, or kill it.

        One that is idle ends at once, one that is starting as soon as it has.
        """
        group.ending = True
        for worker in group.workers.values() if kill else ():
            ray.kill(worker)
        group.notify()

    def _remove(self, group: Group, error: BaseException | None) -> None:
        """Record that the run of a group has ended, perhaps during a job."""
        del self.groups[group.name]
        group.notify()
        shutil.rmtree(Path(self.storage_path) / group.name, ignore_errors=True)
        message = _error_message(error)
        if error is not None and not group.ready and _NO_ROOM not in message:  # nodes may be slow
            self._start_failures += 1
        if self._start_failures >= _START_FAILURES:
            self._start_failures = 0
            reason = f"no group of workers could start: {last_error(message)}"
            for lease in [lease for lease in self.waiting if lease.shape == group.shape]:
                self.waiting.remove(lease)
                lease.events.put_nowait(LeaseEvent(error=reason))
        if group.lease is not None:
            self._fail(group.lease, message, counts=not _is_excused(error, message))
        self._match()

    def _fail(self, lease: Lease, message: str, *, counts: bool = True) -> None:
        """Try a job again, unless it has failed too often.

        Args:
            counts: Whether this failure counts.
        """
        if lease.released:
            return
        lease.group = None
        lease.answer = None
        lease.failures += counts
        if lease.failures > lease.job.max_failures:
            lease.events.put_nowait(LeaseEvent(error=last_error(message)))
        else:
            self.waiting.insert(0, lease)

    def _answer(self, lease: Lease, proceed: bool) -> bool:
        """Answer a report; return whether a group was waiting for it."""
        answer = lease.answer
        lease.answer = None
        if answer is None or answer.done():
            return False
        answer.set_result(proceed)
        return True

    async def _watch(self) -> None:
        """End groups that were idle for long, and release the leases of dead holders."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now = time.monotonic()
            for lease in list(self.leases.values()):
                if now - lease.heartbeat_at > self.lost_seconds:
                    await self.release(lease.number)
            for group in self._idle():
                if now - group.idle_since > self.idle_seconds:
                    self._end(group)
            with contextlib.suppress(RayError):  # the head is busy or away
                self._make_room()
                alive = self._alive()
                stuck = alive and all(
                    not group.ready and now - group.started > self.stuck_seconds for group in alive
                )
                # Not one more each second
                if self.waiting and stuck and not any(group.reduced for group in alive):
                    self._start_reduced(self.waiting[0].shape)

    def _make_room(self) -> None:
        """End an idle group if others wait for GPUs, such as the planning of a trial."""
        idle = [group for group in self._idle() if group.shape.gpus]
        if idle and any("GPU" in bundle for _, bundle in pending_bundles(cluster_status())):
            self._checks_with_pending_gpus += 1
        else:
            self._checks_with_pending_gpus = 0
        # A group with room waits for less than the time between two checks
        if self._checks_with_pending_gpus > 1:
            self._checks_with_pending_gpus = 0
            self._end(idle[0])

    def _start_reduced(self, shape: Shape) -> None:
        """Start a group on less CPU, or on several nodes, if it cannot start otherwise.

        After nodes were lost, the node with room for it may never return, or it may lack only the
        little CPU of the processes that wait for it. Ray counts CPUs but does not enforce them: the
        group is merely slower.
        """
        resolved = resolve_strategy(shape, cluster_nodes())
        free = free_nodes()
        for step in range(1 + round(20 * (1 - _SMALLEST_SHARE))):
            smaller = resolved._replace(cpus=shape.cpus * (1 - step / 20))
            if group_slots(free, smaller):
                if all(group.placed_shape != smaller for group in self._alive()):
                    self._start(shape, smaller)
                return


def _is_excused(error: BaseException | None, message: str) -> bool:
    """Return whether a node was lost, or a smaller micro-batch has solved the problem."""
    workers = getattr(error, "worker_failures", {}).values()
    preempted = any(getattr(worker, "preempted", False) for worker in workers)
    if preempted or isinstance(error, PreemptionError):
        return True
    return "MicroBatchLoweredError" in message


def _error_message(error: BaseException | None) -> str:
    """Return the errors of the workers, a line each with its type, by which others decide.

    Those that did more than lose another worker come after the others, and lost workers last.
    """
    if error is None:
        return "the group stopped before its job was done"
    failures = list(getattr(error, "worker_failures", {}).values()) or [error]
    failures.sort(key=_weight)
    return "\n".join(f"{type(one).__name__}: {' '.join(str(one).split())}" for one in failures)


def _weight(failure: BaseException) -> int:
    if type(failure).__name__.startswith("WorkerHealthCheck"):
        return 2
    return int("onnection" not in str(failure))
