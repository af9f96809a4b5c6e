"""Nodes that a search needs again: what is requested of Ray's autoscaler, and until when. The autoscaler itself is not
started: that this cluster has node types is a fake."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.experimental.internal_kv import _internal_kv_get

from orchestrator.cluster import node_reservation
from orchestrator.cluster.node_reservation import NodeReservation
from orchestrator.cluster.ray_internals import cluster_status

WORKERS = {"CPU": 4.0, "GPU": 2.0}
OTHERS = {"CPU": 8.0, "GPU": 1.0}


@pytest.fixture
def reservation(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NodeReservation]]:
    monkeypatch.setattr(node_reservation, "node_types", lambda: [(2, WORKERS)])
    yield NodeReservation
    ray.kill(ray.get_actor("headfold-node-reservations", namespace="headfold"))


def requested() -> list[dict[str, float]]:
    """The current request of all searches to the autoscaler."""
    if is_autoscaler_v2():
        demands: Any = cluster_status().resource_demands.cluster_constraint_demand
        return [dict(some.bundle) for d in demands for some in d.bundles_by_count for _ in range(some.count)]
    return json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or "[]")


def comes_to(expected: list[dict[str, float]], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while requested() != expected:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_searches_of_a_cluster_share_its_one_request(reservation: Callable[..., NodeReservation]) -> None:
    first, second = reservation("first", 600.0), reservation("second", 600.0)
    first.hold([WORKERS, WORKERS])
    assert comes_to([WORKERS, WORKERS]), requested()
    second.hold([OTHERS])
    assert comes_to([WORKERS, WORKERS, OTHERS]), requested()
    first.hold([WORKERS])
    assert comes_to([WORKERS, OTHERS]), requested()
    first.release()
    assert comes_to([OTHERS]), requested()
    second.release()
    assert comes_to([]), requested()


def test_of_a_search_that_was_killed_nothing_is_reserved_for_long(
    reservation: Callable[..., NodeReservation],
) -> None:
    reservation("killed", 1.0).hold([WORKERS])  # and is not heard of again
    assert comes_to([WORKERS]), requested()
    assert comes_to([]), requested()


def test_without_an_autoscaler_nothing_is_requested(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_reservation, "node_types", list)
    monkeypatch.setattr(node_reservation, "_start", lambda seconds: pytest.fail("an actor was started"))
    NodeReservation("alone").hold([WORKERS])
