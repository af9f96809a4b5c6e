"""Reservation of idle nodes of an autoscaling cluster that a search will need again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError

from orchestrator.cluster.ray_internals import (
    cancel_bundles,
    node_coordinator,
    node_types,
    request_bundles,
)

LOST_SECONDS = 300.0
"""Seconds without a call of `hold`, after which a reservation expires."""


@dataclass
class NodeReservation:
    """The reservation of one search, made by its driver; without an autoscaler it does nothing.

    Attributes:
        search: Its name on the cluster.
        lost_seconds: See LOST_SECONDS.
    """

    search: str
    lost_seconds: float = LOST_SECONDS
    _coordinator: Any = field(default=None, repr=False)

    def hold(self, bundles: Sequence[dict[str, float]]) -> bool:
        """Reserve nodes for these bundles until the next call, `release`, or the driver's end.

        Returns:
            Whether the search has a request, which may be for nothing.
        """
        with contextlib.suppress(RayError, ValueError):  # the head is busy or away: the next time
            if self._coordinator is None:
                if not bundles or not node_types():
                    return False
                self._coordinator = node_coordinator()
            request_bundles(self._coordinator, self.search, list(bundles), self.lost_seconds)
        return self._coordinator is not None

    def release(self) -> None:
        """End the reservation."""
        if self._coordinator is not None:
            with contextlib.suppress(RayError, ValueError):
                cancel_bundles(self._coordinator, self.search)
            self._coordinator = None
