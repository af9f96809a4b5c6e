"""How many trials fit a cluster at a time, counted node by node: no worker spans two of them."""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from orchestrator.cluster.placement import ACCELERATOR_PREFIX, Demand, ProcessResources
from orchestrator.cluster.ray_internals import (
    ended_autoscaler,
    free_resources,
    is_head,
    node_type_of,
    node_types,
)
from orchestrator.config.schema import ConfigError, SearchConfig
from trainers.settings import AUTO_STRATEGY, Shape, Strategy

REFRESH_SECONDS = 5.0
AUTOSCALER_ENDED = (
    "the cluster's autoscaler is not running: its process on the head node (Ray's monitor) has "
    "stopped, and no node will be added; see {}; restart it with `ray up --restart-only` and "
    "the cluster's file"
)
_SIZES = ("CPU", "GPU")
_EPSILON = 1e-6  # of a CPU or GPU, by which sums of fractions may be off


@dataclass(frozen=True)
class Nodes:
    """Nodes with the same resources.

    Attributes:
        count: Number of nodes that there are or can be.
        resources: Resources of each, by Ray's names.
    """

    count: int
    resources: Mapping[str, float]

    def fits(self, bundle: Mapping[str, float]) -> int:
        """Return how many bundles fit one of the nodes."""
        return min(
            (
                math.floor((self.resources.get(kind, 0.0) + _EPSILON) / amount)
                for kind, amount in bundle.items()
            ),
            default=1,
        )


_NodeKind = tuple[tuple[str, float], ...]


def cluster_nodes() -> list[Nodes]:
    """Return the nodes of the cluster; of an autoscaling cluster, at its full size."""
    nodes = Counter(_node_kind(node["Resources"]) for node in ray.nodes() if node["Alive"])
    for missing in addable_nodes():
        nodes[_node_kind(missing.resources)] += missing.count
    return [Nodes(count, dict(kind)) for kind, count in nodes.items()]


def addable_nodes() -> list[Nodes]:
    """Return the nodes that the autoscaler may still add.

    For each type, that is its maximum minus the present nodes, whatever resources Ray finds on
    those: a node may have more `accelerator_type:` resources than its type states, and other CPUs.
    """
    types = node_types()
    present: dict[str, list[Mapping[str, float]]] = {name: [] for name in types}
    for node in ray.nodes() if types else ():
        if node["Alive"] and (name := _type_of(node, types)) is not None:
            present[name].append(node["Resources"])
    addable = []
    for name, (most, written) in types.items():
        # More nodes of a type have what the first one has, where that is known
        sizes = {
            kind: amount for kind, amount in next(iter(present[name]), {}).items() if kind in _SIZES
        }
        if (count := most - len(present[name])) > 0:
            addable.append(Nodes(count, {**written, **sizes}))
    return addable


def _type_of(
    node: Mapping[str, Any], types: Mapping[str, tuple[int, Mapping[str, float]]]
) -> str | None:
    """Return the name of a node's type among `types`.

    A node that was started without its type gets one with as many GPUs and the same accelerators.
    """
    name = node_type_of(node)
    if name is not None or is_head(node):
        return name if name in types else None
    resources = node["Resources"]
    alike = [
        name
        for name, (_, written) in types.items()
        if written.get("GPU", 0) == resources.get("GPU", 0)
        and all(kind in resources for kind in written if kind.startswith(ACCELERATOR_PREFIX))
        and (written.get("GPU") or written.get("CPU") == resources.get("CPU"))
    ]
    return next(iter(alike), None)


def live_nodes() -> list[Nodes]:
    """Return the running nodes."""
    kinds = Counter(_node_kind(node["Resources"]) for node in ray.nodes() if node["Alive"])
    return [Nodes(count, dict(kind)) for kind, count in kinds.items()]


def free_nodes() -> list[Nodes]:
    """Return the running nodes, each with its unused resources."""
    return [Nodes(1, dict(_node_kind(resources))) for resources in free_resources()]


def _node_kind(resources: Mapping[str, float]) -> _NodeKind:
    """Return the resources of a node that are counted here."""
    counted = [
        (kind, float(amount))
        for kind, amount in resources.items()
        if kind in _SIZES or kind.startswith(ACCELERATOR_PREFIX)
    ]
    return tuple(sorted(counted))


def total(nodes: Sequence[Nodes], kind: str) -> float:
    """Return the CPUs or GPUs of all nodes."""
    return sum(some.count * some.resources.get(kind, 0.0) for some in nodes)


def resolve_strategy(shape: Shape, nodes: Sequence[Nodes]) -> Shape:
    """Return a shape with a strategy that Ray knows.

    If it is left to the nodes, all workers are placed on one node if one has room for them.
    """
    if shape.strategy != AUTO_STRATEGY:
        return shape
    bundle = _joint_bundle(shape)
    strategy: Strategy = "STRICT_PACK" if any(some.fits(bundle) for some in nodes) else "PACK"
    return shape._replace(strategy=strategy)


def group_slots(nodes: Sequence[Nodes], shape: Shape) -> int:
    """Return how many groups of workers of a shape fit the nodes at the same time."""
    if resolve_strategy(shape, nodes).strategy == "STRICT_PACK":
        return slots(nodes, _joint_bundle(shape))
    return slots(nodes, ProcessResources.of_worker(shape).bundle) // shape.workers


def worker_bundles(nodes: Sequence[Nodes], shape: Shape, groups: int) -> list[dict[str, float]]:
    """Return the bundles of a number of groups of workers of a shape."""
    if resolve_strategy(shape, nodes).strategy == "STRICT_PACK":
        return [_joint_bundle(shape)] * groups
    return [ProcessResources.of_worker(shape).bundle] * (groups * shape.workers)


def slots(nodes: Sequence[Nodes], bundle: Mapping[str, float]) -> int:
    """Return how many bundles fit the nodes at a time."""
    return sum(some.count * some.fits(bundle) for some in nodes)


def _joint_bundle(shape: Shape) -> dict[str, float]:
    """Return the bundle of all workers of a shape together."""
    bundle = ProcessResources.of_worker(shape).bundle
    return {kind: shape.workers * amount for kind, amount in bundle.items()}


def concurrency(nodes: Sequence[Nodes], demand: Demand, limit: int | str = "auto") -> int:
    """Return how many trials fit the nodes at a time, at most `limit`.

    Without this limit, trials take every CPU and wait for workers that can never start.

    Raises:
        ConfigError: If not even one trial fits; the message lists the nodes.
    """
    largest = group_slots(nodes, demand.shape)
    fitting = bisect_right(
        range(1, largest + 1), 0, key=lambda trials: 0 if _fit(nodes, demand, trials) else 1
    )
    if not fitting or not slots(nodes, demand.task.bundle):
        refusal = _refusal(nodes, demand)
        if (log := ended_autoscaler()) is not None:
            ended = AUTOSCALER_ENDED.format(log)
            refusal = f"{ended}. On the nodes that are there: {refusal}"
        raise ConfigError(refusal)
    return fitting if limit == "auto" else min(fitting, int(limit))


def search_concurrency(config: SearchConfig, nodes: Sequence[Nodes]) -> int:
    """Return how many trials of a search fit the nodes at a time.

    Raises:
        ConfigError: If not even one does, or not one training of its promotion.
    """
    if (promotion := Demand.of_promotion(config)) is not None:
        try:
            concurrency(nodes, promotion)
        except ConfigError as error:
            raise ConfigError(f"promotion: {error}") from None
    return concurrency(nodes, Demand.of(config), config.resources.max_concurrent)


def _fit(nodes: Sequence[Nodes], demand: Demand, trials: int) -> bool:
    """Return whether the workers of so many trials fit, and the trials' own processes with them."""
    free = _without_workers(nodes, demand, trials)
    if free is None:
        return False
    return not demand.process_cpus or slots(free, {"CPU": demand.process_cpus}) >= trials


def room_to_plan(nodes: Sequence[Nodes], demand: Demand, training: int, planning: int) -> bool:
    """Return whether nodes have room for planning tasks next to the workers of training trials.

    Args:
        nodes: The nodes.
        demand: Resources of a trial.
        training: Trials with workers.
        planning: Tasks that plan.
    """
    free = _without_workers(nodes, demand, training)
    return free is not None and slots(free, demand.task.bundle) >= planning


def _without_workers(nodes: Sequence[Nodes], demand: Demand, trials: int) -> list[Nodes] | None:
    """Return the nodes without what the workers of some trials take; None if they do not fit."""
    shape = resolve_strategy(demand.shape, nodes)
    if shape.strategy == "STRICT_PACK":
        bundle = _joint_bundle(shape)
        left = trials
    else:
        bundle = demand.worker.bundle
        left = trials * shape.workers
    free: list[Nodes] = []
    # Nodes without GPUs first, as Ray does too; where workers take GPUs, these fit none of them
    for some in sorted(nodes, key=lambda some: some.resources.get("GPU", 0.0)):
        each = some.fits(bundle)
        full = min(some.count, left // each) if each else 0
        used_nodes = [(full, each)]
        rest = 0
        if full < some.count:
            rest = min(left - full * each, each)
            used_nodes += [(1, rest), (some.count - full - 1, 0)]
        free += [Nodes(count, _without(some.resources, bundle, used)) for count, used in used_nodes]
        left -= full * each + rest
    return None if left else free


def _without(
    resources: Mapping[str, float], bundle: Mapping[str, float], used: int
) -> dict[str, float]:
    """Return what remains of the resources of a node after some bundles."""
    return {kind: amount - used * bundle.get(kind, 0.0) for kind, amount in resources.items()}


def _refusal(nodes: Sequence[Nodes], demand: Demand) -> str:
    """Return why not even one trial fits."""
    shape = demand.shape
    available = describe_nodes(nodes)
    for key, accelerator in (
        ("accelerator_type", shape.accelerator_type),
        ("trial_accelerator_type", demand.task_type),
    ):
        if accelerator and not _of_type(nodes, accelerator):
            return f"resources.{key}: no node has {accelerator!r}; {available}"
    typed = _of_type(nodes, shape.accelerator_type)
    for kind, of_worker, of_process in (
        ("GPU", shape.gpus, 0.0),
        ("CPU", shape.cpus, demand.process_cpus),
    ):
        name = f"{kind.lower()}s"
        cluster_total = total(typed, kind)
        need = shape.workers * of_worker + of_process
        if need > cluster_total + _EPSILON:
            return (
                f"train.num_workers: {shape.workers} worker(s) need {need:g} {kind} "
                f"({shape.workers} x {of_worker:g} and {of_process:g} for the trial itself), but "
                f"the cluster has {cluster_total:g}; lower train.num_workers, "
                f"train.{name}_per_worker or resources.trial_{name}, or add nodes"
            )
    if not slots(nodes, demand.task.bundle):
        key = "trial_gpus" if demand.trial_gpus else "trial_cpus"
        return f"resources.{key}: planning needs {demand.task} on one node; {available}"
    if not slots(nodes, demand.worker.bundle):
        return (
            "train.gpus_per_worker, train.cpus_per_worker: a worker needs "
            f"{demand.worker} on one node; {available}"
        )
    if shape.strategy == "STRICT_PACK":
        return (
            f"resources.placement_strategy: STRICT_PACK needs {shape.workers} workers of "
            f"{demand.worker} on one node, and none has room for them; set "
            f"placement_strategy=PACK or lower train.num_workers; {available}"
        )
    return (
        f"train.num_workers: {shape.workers} workers of {demand.worker} do not fit the nodes one "
        f"by one, with {demand.process_cpus:g} CPU for the trial itself; lower train.num_workers "
        f"or train.cpus_per_worker; {available}"
    )


def _of_type(nodes: Sequence[Nodes], accelerator_type: str | None) -> list[Nodes]:
    """Return the nodes with accelerators of a type; all for None."""
    kind = f"{ACCELERATOR_PREFIX}{accelerator_type}"
    return [some for some in nodes if not accelerator_type or kind in some.resources]


def describe_nodes(nodes: Sequence[Nodes]) -> str:
    """Return the nodes as text."""
    parts = []
    for some in nodes:
        types = [kind for kind in some.resources if kind.startswith(ACCELERATOR_PREFIX)]
        accelerator_type = types[0].removeprefix(ACCELERATOR_PREFIX) if types else None
        cpus = some.resources.get("CPU", 0.0)
        gpus = some.resources.get("GPU", 0.0)
        amounts = str(ProcessResources(cpus, gpus, accelerator_type)) or "nothing"
        parts.append(f"{some.count} of {amounts}")
    return f"the cluster's nodes: {', '.join(parts) or 'none'}"


class ConcurrencyLimit:
    """Number of trials that fit the cluster now, counted every few seconds: nodes come and go.

    It is always at least one, which waits for workers until nodes come back.
    """

    def __init__(self, demand: Demand, limit: int | str = "auto") -> None:
        self._demand = demand
        self._limit = limit
        self._counted_at = -math.inf
        self._fitting: int | None = None

    def trials(self) -> int:
        """Return the number, and print it when it has changed."""
        now = time.monotonic()
        if now - self._counted_at >= REFRESH_SECONDS:
            self._counted_at = now
            before = self._fitting
            self._fitting = 0
            with contextlib.suppress(ConfigError):
                self._fitting = concurrency(cluster_nodes(), self._demand, self._limit)
            if before is not None and self._fitting != before:
                note = "" if self._fitting else "; the search waits for nodes"
                change = f"room for {self._fitting} trial(s) at a time{note}"
                print(f"cluster  has changed: {change}", flush=True)
        return max(1, self._fitting or 0)
