"""Calls on the nodes of a cluster that end in time, and whose failure harms nothing else."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.ray_tasks import cancel_unfinished

_T = TypeVar("_T")


class NoAnswerError(Exception):
    """A call has not answered in time."""


class ClusterNode(NamedTuple):
    """A node that is up.

    Attributes:
        identity: Ray's.
        name: Of the host, with the start of the identity where several nodes have that name.
        resources: Under Ray's names.
    """

    identity: str
    name: str
    resources: Mapping[str, float]

    @property
    def gpus(self) -> int:
        """The GPUs that Ray counts."""
        return int(self.resources.get("GPU", 0))

    @property
    def strategy(self) -> NodeAffinitySchedulingStrategy:
        """The strategy of a task that must run here."""
        return NodeAffinitySchedulingStrategy(self.identity, soft=False)


def alive_nodes() -> list[ClusterNode]:
    """Return the nodes that are up, that of this process first."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    hosts = Counter(node["NodeManagerHostname"] for node in nodes)
    here = ray.get_runtime_context().get_node_id()
    nodes.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerHostname"]))
    result = []
    for node in nodes:
        host = node["NodeManagerHostname"]
        identity = node["NodeID"]
        name = host if hosts[host] == 1 else f"{host}/{identity[:6]}"
        result.append(ClusterNode(identity, name, node["Resources"]))
    return result


def call(
    work: Callable[..., _T],
    *arguments: Any,
    node: ClusterNode,
    seconds: float,
    gpus: float = 0.0,
) -> _T:
    """Return `work(*arguments)`, called in a process on a node.

    Raises:
        NoAnswerError: After so many seconds; the process is ended.
        Exception: What `work` raises, or Ray's error for a process that has died.
    """
    answer = call_on_nodes(work, *arguments, nodes=[node], seconds=seconds, gpus=gpus)[node.name]
    if isinstance(answer, BaseException):
        raise answer
    return answer


def call_on_nodes(
    work: Callable[..., _T],
    *arguments: Any,
    nodes: Sequence[ClusterNode],
    seconds: float,
    gpus: float = 0.0,
) -> dict[str, _T | Exception]:
    """Return what `work(*arguments)` returns or raises on each node, by the node's name.

    Args:
        work: Called in a process on each node, at the same time.
        *arguments: Of `work`.
        nodes: Where.
        seconds: After which the processes are ended that have not answered.
        gpus: Of each process.
    """
    remote: Any = ray.remote(max_retries=0, num_cpus=0, num_gpus=gpus)(work)
    tasks = {
        node.name: remote.options(scheduling_strategy=node.strategy).remote(*arguments)
        for node in nodes
    }
    deadline = time.monotonic() + seconds
    answers: dict[str, _T | Exception] = {}
    try:
        for name, task in tasks.items():
            try:
                answers[name] = ray.get(task, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                answers[name] = NoAnswerError(f"no answer within {seconds:g} s")
            except RayTaskError as error:  # without Ray's trace around the reason
                cause = error.cause
                answers[name] = cause if isinstance(cause, Exception) else error
            except RayError as error:
                answers[name] = error
    finally:
        cancel_unfinished(list(tasks.values()))
    return answers
