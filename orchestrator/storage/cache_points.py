"""Losses of a search's models with their caches rounded as engines store them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, cast

from attention.cache_formats import FormatRecord
from orchestrator.storage.json_files import read_json
from orchestrator.storage.paths import SearchFolder
from search_spaces.pareto import ranks

ORIGINAL_ROLE = "original model"
"""The role of the model that the search converts."""
BASELINE_ROLE = "baseline"
TRIAL_ROLE = "trial"
PROMOTED_ROLE = "promoted"


class CacheModel(TypedDict):
    """A model of a search whose cache is measured."""

    name: str
    """The name for people."""
    role: str
    """`ORIGINAL_ROLE`, `BASELINE_ROLE`, `TRIAL_ROLE` or `PROMOTED_ROLE`."""
    label: str
    """The label of the recipe; the role where there is none."""
    trial_id: str | None
    kv_ratio: float
    """The requested ratio of the plan; 1 for the original."""
    folder: str
    """The folder of the weights."""


class CachePoint(CacheModel):
    """A model with its cache in the formats of an engine.

    Losses are held out, in nats per token; the increase is over the original model with a cache
    that is not rounded.
    """

    cache_format: str
    engines: list[str]
    """The engines that support it."""
    flags: list[str]
    """On the command line of each of the engines."""
    kv_bytes_per_token: int
    share: float
    """Share of the bytes of the original's cache in 16 bits."""
    loss: float
    loss_increase: float
    loss_increase_stderr: float | None


class CacheMeasurement(TypedDict):
    """Bytes and losses of one model."""

    caches: dict[str, FormatRecord]
    """Records by format."""
    sequence_losses: dict[str, list[float]]
    """Loss of each held-out sequence, by format; of the original also with its cache not rounded.
    """
    why_not: dict[str, str]
    """Why a format has no entry."""


class EngineCachesRecord(TypedDict):
    """The content of `engine_caches.json`."""

    measurements: dict[str, CacheMeasurement]
    """Measurements by folder of the weights."""
    points: list[CachePoint]


def read_cache_points(folder: SearchFolder) -> list[CachePoint]:
    """Return the points that a search has measured; none if it has not."""
    if not folder.engine_caches.exists():
        return []
    return cast(EngineCachesRecord, read_json(folder.engine_caches))["points"]


def engine_front(points: Sequence[CachePoint]) -> list[CachePoint]:
    """Return the points that no other one beats in bytes and loss, by rising bytes."""
    values = [(point["kv_bytes_per_token"], point["loss"]) for point in points]
    best = [point for point, rank in zip(points, ranks(values), strict=True) if rank == 0]
    by_size = {point["kv_bytes_per_token"]: point for point in reversed(best)}
    return [by_size[size] for size in sorted(by_size)]
