"""The worker pool: the actor that keeps groups of workers and gives them jobs (`orchestrator.cluster.pool_client`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.train import PreemptionError

from orchestrator.cluster.capacity import capacity, free_nodes, groups, settled
from orchestrator.cluster.ray_internals import cluster_status, pending
from orchestrator.cluster.session import last_error, ray_train_intervals
from trainers.jobs.worker import TrainJob, serve_pool
from trainers.settings import Shape

LEAST_SHARE = 0.5
LOOK_SECONDS = 1.0
START_FAILURES = 2  # in a row, after which waiting jobs are told that no group starts
NO_ROOM = "worker group startup timed out"  # what Ray Train says of nodes that have not come yet
CLOSE_SECONDS = 15.0


@dataclass(eq=False)
class Group:
    """A group of workers as the pool sees it. `asked`: what Ray was asked for, once it was; `given`: the job under way,
    with its number."""

    name: str
    shape: Shape
    started: float
    workers: dict[int, Any] = field(default_factory=dict)
    given: tuple[int, str] | None = None
    lease: Lease | None = None
    jobs: int = 0
    ended: dict[int, Any] = field(default_factory=dict)
    ready: bool = False
    ending: bool = False
    squeezed: bool = False
    asked: Shape | None = None
    idle_since: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        """Wake the workers that wait."""
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(eq=False)
class Lease:
    """A job and its holder. `reported`: the last step that the holder was told of."""

    number: int
    job: TrainJob
    seen: float
    reported: int = -1
    failures: int = 0
    group: Group | None = None
    events: asyncio.Queue = field(default_factory=asyncio.Queue)
    answer: asyncio.Future | None = None
    released: bool = False

    @property
    def shape(self) -> Shape:
        return self.job.shape


@dataclass(eq=False)
class Pool:
    """The actor. All methods run in one event loop; only `serve_pool` blocks, in a thread a group.

    A group ends after `idle_seconds` without a job; a lease's holder counts as dead after `lost_seconds` without a
    heartbeat; after `stuck_seconds` without a worker anywhere one may start on less CPU than it should have.
    """

    name: str
    storage_path: str
    idle_seconds: float = 300.0
    lost_seconds: float = 60.0
    stuck_seconds: float = 60.0

    def __post_init__(self) -> None:
        # Looked at ten times a second a group that lasts would cost a few per cent of a core for nothing
        ray_train_intervals(look_seconds=0.5)
        self.groups: dict[str, Group] = {}
        self.leases: dict[int, Lease] = {}
        self.waiting: list[Lease] = []
        self._numbers, self._starts = itertools.count(), itertools.count()
        self._start_failures, self._wanted, self._closing = 0, 0, False
        self._watch: asyncio.Task | None = None
        self._self: Any = None

    async def open(self) -> None:
        """Must be called once: needs the event loop, which the constructor does not have."""
        self._self = ray.get_runtime_context().current_actor
        self._watch = asyncio.get_running_loop().create_task(self._look())

    # ---- for the holders of leases ----------------------------------------------------------------------------

    async def lease(self, job: str) -> tuple[int, float]:
        """Have a job done by a group; its number, and how often its holder must say that it is alive, in seconds."""
        lease = Lease(next(self._numbers), TrainJob.from_json(job), time.monotonic())
        self.leases[lease.number] = lease
        self.waiting.append(lease)
        self._match()
        return lease.number, self.lost_seconds / 10

    async def wait(self, number: int, seconds: float) -> dict[str, Any] | None:
        """The next event of a lease: {"report"}, {"ended"} or {"failed"}; None if there is none for `seconds`."""
        lease = self.leases.get(number)
        if lease is None:  # taken away, though its holder lives
            reason = f"nothing was heard from the trial for {self.lost_seconds:g} seconds, so its workers were released"
            return {"failed": reason}
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(lease.events.get(), seconds)

    async def alive(self, number: int) -> None:
        if number in self.leases:
            self.leases[number].seen = time.monotonic()

    async def go_on(self, number: int) -> None:
        """The answer to a report."""
        if (lease := self.leases.get(number)) is not None:
            self._answer(lease, True)

    async def release(self, number: int) -> None:
        """The holder wants no more. A job under way ends at the milestone where it waits, else with its workers."""
        lease = self.leases.pop(number, None)
        if lease is None:
            return
        lease.released = True
        if lease in self.waiting:
            self.waiting.remove(lease)
        if lease.group is not None and not self._answer(lease, False) and lease.reported < lease.job.milestones[-1]:
            self._end(lease.group, kill=True)

    async def state(self) -> dict[str, Any]:
        """For tests and for people."""
        return {
            "groups": {g.name: {"shape": g.shape, "jobs": g.jobs, "busy": g.lease is not None} for g in self._alive()},
            "leases": sorted(self.leases),
            "waiting": [lease.number for lease in self.waiting],
        }

    async def close(self) -> None:
        """End all groups in order, as far as they let themselves be."""
        self._closing = True
        for group in list(self.groups.values()):
            self._end(group, kill=group.lease is not None)  # nobody waits for what is under way
        deadline = time.monotonic() + CLOSE_SECONDS
        while self.groups and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for group in list(self.groups.values()):
            self._end(group, kill=True)
        if self._watch is not None:
            self._watch.cancel()

    # ---- for the groups' workers ------------------------------------------------------------------------------

    async def next(self, name: str, rank: int, number: int, worker: Any) -> str | None:
        group = self.groups.get(name)
        if group is not None and rank not in group.workers:
            group.workers[rank] = worker
            if len(group.workers) == group.shape.workers:
                group.ready, group.idle_since, self._start_failures = True, time.monotonic(), 0
                self._match()
        while group is not None and name in self.groups and not group.ending:
            if group.given is not None and group.given[0] == number:
                return group.given[1]
            await group.changed.wait()
        return None

    async def report(self, name: str, metrics: dict[str, Any], last: bool) -> bool:
        """Rank 0's milestone; waits for the holder's answer unless nothing comes after it."""
        lease = self.groups[name].lease
        if lease is None or lease.released:
            return False
        if metrics["step"] <= lease.reported:
            return True
        lease.reported = metrics["step"]
        if last:
            lease.events.put_nowait({"report": metrics})
            return True
        lease.answer = asyncio.get_running_loop().create_future()
        lease.events.put_nowait({"report": metrics})
        return await lease.answer

    async def finished(self, name: str, rank: int, ended: dict[str, Any]) -> None:
        group = self.groups[name]
        group.ended[rank] = ended
        if len(group.ended) < group.shape.workers:
            return
        lease, outcome = group.lease, group.ended[0]
        group.lease, group.given, group.ended, group.idle_since = None, None, {}, time.monotonic()
        group.jobs += 1
        if lease is not None and "failed" in outcome:
            self._failed(lease, outcome["failed"])
        elif lease is not None:
            lease.group = None
            lease.events.put_nowait({"ended": outcome})
        self._match()

    # ---- inside -----------------------------------------------------------------------------------------------

    def _alive(self) -> list[Group]:
        return [group for group in self.groups.values() if not group.ending]

    def _idle(self) -> list[Group]:
        return [group for group in self._alive() if group.ready and group.lease is None]

    def _match(self) -> None:
        """Give waiting jobs to idle groups of their shape, and start groups for the others."""
        for lease in list(self.waiting):
            if (group := next((g for g in self._idle() if g.shape == lease.shape), None)) is not None:
                self.waiting.remove(lease)
                group.lease, lease.group = lease, group
                group.given = (group.jobs, lease.job.to_json())
                group.tell()
        for shape in {lease.shape for lease in self.waiting}:
            wanted = sum(lease.shape == shape for lease in self.waiting)
            starting = sum(g.shape == shape and not g.ready for g in self._alive())
            for _ in range(wanted - starting):
                # What is idle has another shape; it may be where this one needs room
                for other in self._idle()[:1]:
                    self._end(other)
                self._start(shape)

    def _start(self, shape: Shape, asked: Shape | None = None) -> None:
        """A group of a shape, for which Ray is asked for `asked` if that is not the shape as the nodes hold it."""
        if self._closing:
            return
        group = Group(f"{self.name}-{next(self._starts)}", shape, time.monotonic(), squeezed=asked is not None)
        self.groups[group.name] = group
        loop = asyncio.get_running_loop()

        def keep() -> None:
            error: BaseException | None = None
            try:
                group.asked = asked or settled(shape, capacity())
                serve_pool(self._self, group.name, group.asked, self.storage_path)
            except BaseException as failure:
                error = failure
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._gone, group, error)

        threading.Thread(target=keep, name=group.name, daemon=True).start()

    def _end(self, group: Group, kill: bool = False) -> None:
        """End a group once its job is done, or kill it; one that is idle ends at once, one that is starting then."""
        group.ending = True
        for worker in group.workers.values() if kill else ():
            ray.kill(worker)
        group.tell()

    def _gone(self, group: Group, error: BaseException | None) -> None:
        """A group's run has ended, perhaps under its job."""
        del self.groups[group.name]
        group.tell()
        shutil.rmtree(Path(self.storage_path) / group.name, ignore_errors=True)
        lease, said = group.lease, _said(error)
        self._start_failures += error is not None and not group.ready and NO_ROOM not in said  # nodes may be slow
        if self._start_failures >= START_FAILURES:
            self._start_failures = 0
            for waiting in [w for w in self.waiting if w.shape == group.shape]:
                self.waiting.remove(waiting)
                waiting.events.put_nowait({"failed": f"no group of workers could start: {last_error(said)}"})
        if lease is not None:
            self._failed(lease, said, _forgiven(error, said))
        self._match()

    def _failed(self, lease: Lease, said: str, forgiven: bool = False) -> None:
        """A job has another try, unless it has failed too often; what is `forgiven` does not count."""
        if lease.released:
            return
        lease.group, lease.answer = None, None
        lease.failures += not forgiven
        if lease.failures > lease.job.max_failures:
            lease.events.put_nowait({"failed": last_error(said)})
        else:
            self.waiting.insert(0, lease)

    def _answer(self, lease: Lease, go: bool) -> bool:
        """Whether somebody had waited for it."""
        answer, lease.answer = lease.answer, None
        if answer is None or answer.done():
            return False
        answer.set_result(go)
        return True

    async def _look(self) -> None:
        """Ends groups that are idle for long, and takes the leases of holders that have died."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            for lease in [held for held in self.leases.values() if now - held.seen > self.lost_seconds]:
                await self.release(lease.number)
            for group in self._idle():
                if now - group.idle_since > self.idle_seconds:
                    self._end(group)
            self._make_room()
            alive = self._alive()
            stuck = alive and all(not g.ready and now - g.started > self.stuck_seconds for g in alive)
            if self.waiting and stuck and not any(g.squeezed for g in alive):  # not one more a second
                self._squeeze(self.waiting[0].shape)

    def _make_room(self) -> None:
        """End an idle group if somebody waits for GPUs, such as a trial that plans on one before it trains."""
        idle = [group for group in self._idle() if group.shape.gpus]
        wanted = bool(idle) and any("GPU" in asked for _, asked in pending(cluster_status()))
        self._wanted = self._wanted + 1 if wanted else 0
        if self._wanted > 1:  # what has room waits for less than a look
            self._wanted = 0
            self._end(idle[0])

    def _squeeze(self, shape: Shape) -> None:
        """Start a group on less CPU, or on several nodes, where only that keeps it from starting: once nodes have gone,
        the one that would hold it may not come back, or the little CPU of those who wait for it is what it lacks, for
        ever. Ray counts CPUs and enforces none: it is slower, no more."""
        whole, free = settled(shape, capacity()), free_nodes()
        steps = range(1 + round(20 * (1 - LEAST_SHARE)))
        smaller = (whole._replace(cpus=shape.cpus * (1 - step / 20)) for step in steps)
        asked = next((each for each in smaller if groups(free, each)), None)
        if asked is not None and all(asked != group.asked for group in self._alive()):
            self._start(shape, asked)


def _forgiven(error: BaseException | None, said: str) -> bool:
    """Whether a node was taken away, or a smaller micro-batch has put right what was wrong."""
    workers = getattr(error, "worker_failures", {}).values()
    preempted = isinstance(error, PreemptionError) or any(getattr(worker, "preempted", False) for worker in workers)
    return preempted or "MicroBatchLoweredError" in said


def _said(error: BaseException | None) -> str:
    """What the workers said, those last that did not merely lose another one."""
    if error is None:
        return "the group ended before its job was done"
    said = sorted((str(w) for w in getattr(error, "worker_failures", {}).values()), key=lambda w: "onnection" not in w)
    return "\n".join(said) or f"{type(error).__name__}: {error}"
