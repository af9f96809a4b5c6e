"""Reservation of idle nodes of an autoscaling cluster that searches will need again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.cluster.ray_internals import head_options, node_types, request_bundles

LOST_SECONDS = 300.0
"""Seconds without a message from its search, after which a reservation ends."""
_ACTOR = "headfold-node-reservations"
_NAMESPACE = "headfold"
_CHECK_SECONDS = 5.0

Bundle = dict[str, float]


@dataclass(eq=False)
class NodeReservations:
    """The actor, one for all searches of a cluster: Ray has one request of nodes at a time.

    It outlives a search that is killed, and ends its reservation.
    """

    lost_seconds: float = LOST_SECONDS

    def __post_init__(self) -> None:
        self._holds: dict[str, tuple[list[Bundle], float]] = {}
        self._requested: list[Bundle] = []
        self._watcher: asyncio.Task | None = None

    async def hold(self, search: str, bundles: list[Bundle]) -> None:
        """Reserve nodes for these bundles of a search, instead of the previous ones."""
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())
        self._holds[search] = (bundles, time.monotonic())
        self._request()

    async def release(self, search: str) -> None:
        """End the reservation of a search."""
        self._holds.pop(search, None)
        self._request()

    def _request(self) -> None:
        bundles = [bundle for reserved, _ in self._holds.values() for bundle in reserved]
        if bundles != self._requested:
            request_bundles(bundles)
            self._requested = bundles

    async def _watch(self) -> None:
        """End the reservations of searches that no longer send messages."""
        while True:
            await asyncio.sleep(min(_CHECK_SECONDS, self.lost_seconds / 4))
            now = time.monotonic()
            for search, (_, heard_at) in list(self._holds.items()):
                if now - heard_at > self.lost_seconds:
                    await self.release(search)


@dataclass
class NodeReservation:
    """The reservation of one search, made by its driver; without an autoscaler it does nothing.

    Attributes:
        search: Its name on the cluster.
        lost_seconds: See LOST_SECONDS.
    """

    search: str
    lost_seconds: float = LOST_SECONDS
    _actor: Any = field(default=None, repr=False)

    def hold(self, bundles: Sequence[Bundle]) -> None:
        """Reserve nodes for these bundles until the next call, `release`, or the driver's end."""
        with contextlib.suppress(RayError, ValueError):  # the head is busy or away: the next time
            if self._actor is None:
                if not bundles or not node_types():
                    return
                self._actor = _start(self.lost_seconds)
            self._actor.hold.remote(self.search, list(bundles))

    def release(self) -> None:
        """End the reservation."""
        if self._actor is not None:
            with contextlib.suppress(RayError):
                ray.get(self._actor.release.remote(self.search), timeout=10)
            self._actor = None


def _start(lost_seconds: float) -> Any:
    options = {
        **head_options(),
        "name": _ACTOR,
        "namespace": _NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
    }
    actor: Any = ray.remote(NodeReservations).options(**options)
    return actor.remote(lost_seconds)
