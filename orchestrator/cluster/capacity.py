"""How many trials a cluster has room for at a time, counted node by node: a worker never spans two of them."""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from orchestrator.cluster.placement import OF_TYPE, Demand, bundle, in_words
from orchestrator.cluster.ray_internals import ended_autoscaler, free_on_nodes, node_types
from orchestrator.config.schema import ConfigError, SearchConfig
from trainers.settings import AUTO_STRATEGY, Shape, Strategy

LOOK_SECONDS = 5.0
AUTOSCALER_ENDED = (
    "the cluster's autoscaler is not running: its process on the head node (Ray's monitor) has ended, and no node will "
    "be added; {} says why; restart it with `ray up --restart-only` and the cluster's file"
)
EPSILON = 1e-6  # of a CPU or GPU, by which sums of fractions may be off


@dataclass(frozen=True)
class Nodes:
    """Nodes that are alike: how many there are or can be, and the resources of each, under Ray's names."""

    count: int
    resources: Mapping[str, float]

    def times(self, need: Mapping[str, float]) -> int:
        """How often `need` fits one of them."""
        fits = (math.floor((self.resources.get(k, 0.0) + EPSILON) / amount) for k, amount in need.items())
        return min(fits, default=1)


def capacity() -> list[Nodes]:
    """The nodes of the cluster, of an autoscaling one at its full size."""
    here = Counter({_kind(some.resources): some.count for some in present()})
    most: Counter[tuple[tuple[str, float], ...]] = Counter()
    for count, resources in node_types():
        most[_kind(resources)] += count
    return [Nodes(count, dict(kind)) for kind, count in (here | most).items()]


def present() -> list[Nodes]:
    """The nodes that are there."""
    here = Counter(_kind(node["Resources"]) for node in ray.nodes() if node["Alive"])
    return [Nodes(count, dict(kind)) for kind, count in here.items()]


def free_nodes() -> list[Nodes]:
    """The nodes that are there, with what nobody uses of them."""
    return [Nodes(1, dict(_kind(resources))) for resources in free_on_nodes()]


def _kind(resources: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """What is counted of a node."""
    counted = ((k, float(v)) for k, v in resources.items() if k in ("CPU", "GPU") or k.startswith(OF_TYPE))
    return tuple(sorted(counted))


def total(nodes: Sequence[Nodes], kind: str) -> float:
    """CPUs or GPUs of all nodes."""
    return sum(some.count * some.resources.get(kind, 0.0) for some in nodes)


def settled(shape: Shape, nodes: Sequence[Nodes]) -> Shape:
    """The shape with a strategy that Ray knows: where it is left to the nodes, all workers on one if one can hold
    them."""
    if shape.strategy != AUTO_STRATEGY:
        return shape
    strategy: Strategy = "STRICT_PACK" if any(some.times(_together(shape)) for some in nodes) else "PACK"
    return shape._replace(strategy=strategy)


def groups(nodes: Sequence[Nodes], shape: Shape) -> int:
    """How many groups of workers of a shape fit the nodes at a time."""
    if settled(shape, nodes).strategy == "STRICT_PACK":
        return sum(some.count * some.times(_together(shape)) for some in nodes)
    return slots(nodes, bundle(*shape[1:4])) // shape.workers


def slots(nodes: Sequence[Nodes], need: Mapping[str, float]) -> int:
    """How many processes that need this much each fit the nodes at a time."""
    return sum(some.count * some.times(need) for some in nodes)


def _together(shape: Shape) -> dict[str, float]:
    """All workers of a shape as one."""
    return {kind: shape.workers * amount for kind, amount in bundle(*shape[1:4]).items()}


def concurrency(nodes: Sequence[Nodes], demand: Demand, limit: int | str = "auto") -> int:
    """How many trials fit the nodes at a time, at most `limit`.

    Without this cap trials take every CPU and wait for workers that can never start. Raises ConfigError, with what
    there is, if not even one trial fits.
    """
    most = groups(nodes, demand.shape)
    fit = bisect_right(range(1, most + 1), 0, key=lambda trials: 0 if _fit(nodes, demand, trials) else 1)
    if not fit or not slots(nodes, demand.task):
        refusal = _refusal(nodes, demand)
        if (log := ended_autoscaler()) is not None:
            refusal = f"{AUTOSCALER_ENDED.format(log)}. On the nodes that are there: {refusal}"
        raise ConfigError(refusal)
    return fit if limit == "auto" else min(fit, int(limit))


def room_for(config: SearchConfig, nodes: Sequence[Nodes]) -> int:
    """How many trials of a search fit the nodes at a time. Raises ConfigError if not even one does, or not one training
    of its promotion."""
    if (promoted := Demand.of_promotion(config)) is not None:
        try:
            concurrency(nodes, promoted)
        except ConfigError as error:
            raise ConfigError(f"promotion: {error}") from None
    return concurrency(nodes, Demand.of(config), config.resources.max_concurrent)


def _fit(nodes: Sequence[Nodes], demand: Demand, trials: int) -> bool:
    """Whether the workers of so many trials fit, and beside them the trials' own processes."""
    shape = settled(demand.shape, nodes)
    strict = shape.strategy == "STRICT_PACK"
    need, left = (_together(shape), trials) if strict else (bundle(*shape[1:4]), trials * shape.workers)
    free: list[Nodes] = []
    # Nodes without GPUs first, as Ray does too; where GPUs are asked for, none of the others fits anything
    for some in sorted(nodes, key=lambda some: some.resources.get("GPU", 0.0)):
        each = some.times(need)
        full = min(some.count, left // each) if each else 0
        rest = min(left - full * each, each) if full < some.count else 0
        cpus = some.resources.get("CPU", 0.0)
        taken = ((full, each), (1, rest), (some.count - full - 1, 0)) if full < some.count else ((full, each),)
        free += [Nodes(count, {"CPU": cpus - used * need["CPU"]}) for count, used in taken]
        left -= full * each + rest
    return left == 0 and (not demand.process_cpus or slots(free, {"CPU": demand.process_cpus}) >= trials)


def _refusal(nodes: Sequence[Nodes], demand: Demand) -> str:
    """Why not even one trial fits."""
    shape, typed = demand.shape, list(nodes)
    for key, kind in (("accelerator_type", shape.accelerator_type), ("trial_accelerator_type", demand.task_type)):
        of_kind = [some for some in nodes if not kind or f"{OF_TYPE}{kind}" in some.resources]
        if not of_kind:
            return f"resources.{key}: no node has {kind!r}; {_there_is(nodes)}"
        typed = of_kind if key == "accelerator_type" else typed
    for kind, of_worker, own in (("GPU", shape.gpus, 0.0), ("CPU", shape.cpus, demand.process_cpus)):
        name, have = f"{kind.lower()}s", total(typed, kind)
        need = shape.workers * of_worker + own
        if need > have + EPSILON:
            return (
                f"train.num_workers: {shape.workers} worker(s) need {need:g} {kind} "
                f"({shape.workers} x {of_worker:g} and {own:g} for the trial itself), but the cluster has {have:g}; "
                f"lower train.num_workers, train.{name}_per_worker or resources.trial_{name}, or add nodes"
            )
    if not slots(nodes, demand.task):
        key = "trial_gpus" if demand.trial_gpus else "trial_cpus"
        return f"resources.{key}: planning needs {in_words(*demand.task_needs)} on one node; {_there_is(nodes)}"
    worker = in_words(*shape[1:4])
    if not slots(nodes, bundle(*shape[1:4])):
        return f"train.gpus_per_worker, train.cpus_per_worker: a worker needs {worker} on one node; {_there_is(nodes)}"
    if shape.strategy == "STRICT_PACK":
        return (
            f"resources.placement_strategy: STRICT_PACK wants {shape.workers} workers of {worker} on one node, and "
            f"none can hold them; set placement_strategy=PACK or lower train.num_workers; {_there_is(nodes)}"
        )
    return (
        f"train.num_workers: {shape.workers} workers of {worker} do not fit the nodes one by one, with "
        f"{demand.process_cpus:g} CPU for the trial itself; lower train.num_workers or train.cpus_per_worker; "
        f"{_there_is(nodes)}"
    )


def _there_is(nodes: Sequence[Nodes]) -> str:
    """The nodes in words."""
    words = []
    for some in nodes:
        kind = next((k.removeprefix(OF_TYPE) for k in some.resources if k.startswith(OF_TYPE)), None)
        amounts = in_words(some.resources.get("CPU", 0.0), some.resources.get("GPU", 0.0), kind) or "nothing"
        words.append(f"{some.count} of {amounts}")
    return f"the cluster's nodes: {', '.join(words) or 'none'}"


class Room:
    """How many trials fit the cluster as it is now; asked anew every few seconds, since nodes come and go. Always at
    least one, which waits for workers until nodes come back."""

    def __init__(self, demand: Demand, limit: int | str = "auto") -> None:
        self._demand, self._limit, self._looked = demand, limit, -math.inf
        self._fitting: int | None = None

    def trials(self) -> int:
        """The number, which is printed when it has changed."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            before, self._fitting = self._fitting, 0
            with contextlib.suppress(ConfigError):
                self._fitting = concurrency(capacity(), self._demand, self._limit)
            if before is not None and self._fitting != before:
                waits = "" if self._fitting else "; the search waits for nodes"
                print(f"cluster  has changed: room for {self._fitting} trial(s) at a time{waits}", flush=True)
        return max(1, self._fitting or 0)
