"""The estimate of a conversion from the checkpoint's config alone, and whether it fits."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch

from attention.base.text import gib
from attention.tensor_parallel import RankCache, RankLayoutError
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.layer_source import check_layerwise
from orchestrator.conversion.request import ConversionRequest
from orchestrator.conversion.short_fits import COMPARED_TOKENS, shortly_fitted
from orchestrator.resources.estimate import ConversionEstimate, Estimate, Machine
from orchestrator.resources.rank_estimate import estimate_ranks
from orchestrator.resources.size import Conversion, Size
from orchestrator.resources.time import operations, search_phase_operations
from orchestrator.storage.paths import disk_free
from search_spaces.recipes.recipe import Recipe


def estimate_conversions(
    request: ConversionRequest,
    *,
    elsewhere: Machine | None = None,
    tensor_parallel: int | None = None,
    compared: Sequence[tuple[Recipe, float]] = (),
) -> list[ConversionEstimate]:
    """Return the estimate of each conversion of a request, in falling order of their budgets.

    No weights are read.

    Args:
        request: The conversions.
        elsewhere: The machine to estimate for; by default this one.
        tensor_parallel: GPUs that an engine divides the heads among, to estimate what each holds.
        compared: Recipes and KV ratios that are compared by short fits before the first conversion.

    Raises:
        ConfigError: For heads that cannot be divided so.
    """
    machine = elsewhere or Machine.here(checkpoints.device_of(request.device))
    working = request.working if elsewhere is None else request.written
    why_not = _why_not_layerwise(request)
    points: list[ConversionEstimate] = []
    for budget, requested in request.distinct(report=True).items():
        used = float(budget)
        point = ConversionEstimate.of(
            _conversion(request, used, working),
            machine,
            why_not=why_not,
            requested_ratio=float(requested),
            ceiling=request.ceiling_note(requested, used),
        )
        if tensor_parallel is not None:
            point = replace(point, tensor_parallel=_rank_cache(request, used, tensor_parallel))
        points.append(point)
    first = _conversion(request, points[0].kv_ratio, working)
    shared = _shared_operations(request, first, compared)
    return [replace(points[0], shared_flops=shared), *points[1:]]


def _conversion(request: ConversionRequest, kv_ratio: float, working: torch.dtype) -> Conversion:
    return Conversion(
        request.config,
        request.recipe,
        kv_ratio,
        *request.text_sizes,
        request.written,
        working,
        polish_steps=request.polish.polish,
        polish_weights=request.polish.polish_weights,
    )


def _rank_cache(request: ConversionRequest, kv_ratio: float, ranks: int) -> RankCache:
    try:
        return estimate_ranks(request.recipe, kv_ratio, request.geometry, request.written, ranks)
    except RankLayoutError as error:
        raise ConfigError(f"tensor_parallel: {error}") from None


def _shared_operations(
    request: ConversionRequest, first: Conversion, compared: Sequence[tuple[Recipe, float]]
) -> float:
    """Return the operations that are made once for all KV ratios, before the first conversion."""
    size = Size.of(request.config)
    shared = search_phase_operations(first, size)
    for recipe, kv_ratio in compared:
        short = replace(
            first,
            recipe=shortly_fitted(recipe),
            kv_ratio=kv_ratio,
            calibration_tokens=COMPARED_TOKENS,
            eval_tokens=COMPARED_TOKENS,
            polish_steps=0,
        )
        shared += operations(short, size, short.used_tokens + short.eval_tokens)
    return shared


def _why_not_layerwise(request: ConversionRequest) -> str:
    try:
        check_layerwise(request.recipe, request.config)
    except ValueError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class RunEstimate:
    """The resources of a run of `convert`, and whether it is in memory or layer by layer.

    Attributes:
        points: The estimate of each KV ratio.
        layerwise: Whether it is done layer by layer.
        too_large: Whether it does not fit in memory where the options leave the way open.
        folder: The output folder, if any.
        alternatives: Whether only one of the points will be converted.
    """

    points: tuple[ConversionEstimate, ...]
    layerwise: bool
    too_large: bool
    folder: Path | None
    alternatives: bool = False

    @classmethod
    def of(
        cls,
        points: Sequence[ConversionEstimate],
        folder: str | Path | None,
        *,
        several: bool,
        layerwise: bool | None,
        alternatives: bool = False,
    ) -> RunEstimate:
        """Decide between memory and layer by layer.

        Args:
            points: The estimate of each KV ratio.
            folder: The output folder, if any.
            several: Whether ratios are converted from one calibration, which needs memory.
            layerwise: The way that the options request; None for memory where it fits.
            alternatives: Whether only one of the points will be converted.
        """
        first = points[0]
        is_open = layerwise is None and not several and folder is not None
        too_large = is_open and first.too_large
        by_layer = bool(layerwise) or (too_large and first.layerwise_possible)
        path = None if folder is None else Path(folder)
        return cls(tuple(points), by_layer, too_large, path, alternatives)

    @property
    def total(self) -> Estimate:
        """The resources of all conversions, done one after the other."""
        estimates = [
            point.layer_by_layer if self.layerwise else point.in_memory for point in self.points
        ]
        if self.alternatives:
            total = reduce(Estimate.larger, estimates)
        else:
            total = sum(estimates, Estimate())
            if not self.layerwise:
                again = sum(point.common_seconds for point in self.points[1:])
                total = replace(total, seconds=total.seconds - again)
        if self.folder is None:
            return Estimate(total.memory, seconds=total.seconds)
        return total

    def announce(self, *, verbose: bool = False) -> None:
        """Print on stderr what it will take.

        Args:
            verbose: Whether to list the parts of the memory.

        Raises:
            ConfigError: Where memory or disk do not suffice.
        """
        first = self.points[0]
        for point in self.points:
            if point.ceiling:
                print(point.ceiling, file=sys.stderr, flush=True)
        total = self.total
        print(f"estimate: {total.describe()}", file=sys.stderr, flush=True)
        for topic, text in first.memory_parts.items() if verbose else ():
            print(f"{topic}: {text}", file=sys.stderr, flush=True)
        self.check()

    def check(self) -> None:
        """Raise ConfigError where memory or disk do not suffice."""
        first = self.points[0]
        total = self.total
        if first.available and total.memory > first.available:
            by_layer = sum((point.layer_by_layer for point in self.points), Estimate())
            other = first.why_not
            if first.layerwise_possible:
                other = f"layer by layer it would be {gib(by_layer.memory)}"
            raise ConfigError(
                f"memory: this conversion does not fit: it takes about {gib(total.memory)}, and "
                f"{gib(first.available)} are available; {other}; fewer calibration tokens or "
                "another machine would do"
            )
        if not self.layerwise and 0 < first.host_available < first.host:
            raise ConfigError(
                f"memory: the statistics of this conversion take about {gib(first.host)} of the "
                f"machine's memory, and {gib(first.host_available)} are available; fewer "
                "calibration tokens or another machine would do"
            )
        disk = total.disk + total.scratch
        free = math.inf if self.folder is None else disk_free(self.folder)
        # Where nothing can be written the free space is 0, which has a separate message
        if 0 < free < disk:
            raise ConfigError(
                f"out: the result does not fit: it takes about {gib(disk)}, and {gib(free)} are "
                f"free at {str(self.folder)!r}; free some, or give another folder"
            )

    def report_choice(self) -> None:
        """Print on stderr why it is done layer by layer, or that it cannot be."""
        if not self.too_large:
            return
        first = self.points[0]
        not_possible = "" if first.layerwise_possible else f"; {first.why_not}"
        print(f"this conversion would take about {first.memory}{not_possible}", file=sys.stderr)
