"""What a conversion will take, from the checkpoint's config alone, before it is run; and whether it fits."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention.base.text import gib
from orchestrator.config.schema import ConfigError
from orchestrator.conversion import loading
from orchestrator.conversion.one_layer import check_layerwise
from orchestrator.conversion.request import ConversionRequest
from orchestrator.resources.estimate import ConversionEstimate, Estimate, Machine
from orchestrator.resources.size import Conversion
from orchestrator.storage.paths import disk_free
from search_spaces.recipes.recipe import Recipe


def estimate_conversion(
    model: str | Path,
    recipe: str | Recipe,
    kv_ratio: float,
    **settings: Any,
) -> ConversionEstimate:
    """The estimate of `convert_checkpoint` with these arguments, from config.json alone. Raises as that does."""
    (result,) = estimate_conversions(model, recipe, [kv_ratio], **settings)
    return result


def estimate_conversions(
    model: str | Path,
    recipe: str | Recipe,
    kv_ratios: Sequence[float],
    *,
    elsewhere: Machine | None = None,
    **settings: Any,
) -> list[ConversionEstimate]:
    """The estimate of each conversion that these ratios come to, those of several in falling order of their budgets.
    `elsewhere`: on that machine, which need not be there.

    Raises as `convert_checkpoint` does.
    """
    if elsewhere is not None:
        settings |= {"device": "cpu"}  # whose checks pass anywhere
    request = ConversionRequest.check(model, recipe, kv_ratios, config_only=True, **settings)
    machine = elsewhere or Machine.here(loading.device_of(request.device))
    working = request.working if elsewhere is None else request.written
    why_not = _why_not_layerwise(request)
    points = []
    for budget, requested in request.distinct(kv_ratios, report=True).items():
        used = float(budget)
        conversion = Conversion(request.config, request.recipe, used, *request.text_sizes, request.written, working)
        point = ConversionEstimate.of(
            conversion,
            machine,
            why_not=why_not,
            requested_ratio=float(requested),
            ceiling=request.ceiling_note(requested, used),
        )
        points.append(point)
    return points


def _why_not_layerwise(request: ConversionRequest) -> str:
    try:
        check_layerwise(request.recipe, request.config)
    except ValueError as error:
        return str(error)
    return ""


def needs_layerwise(model: str | Path, recipe: str | Recipe, kv_ratio: float, **settings: Any) -> bool:
    """Whether a conversion does not fit into the memory that is available, but would layer by layer."""
    point = estimate_conversion(model, recipe, kv_ratio, **settings)
    if not point.too_large:
        return False
    words = point.describe()
    about = f"about {words['in memory']}, {words['available now']} available; layer by layer: "
    print(f"this conversion would take {about}{words['layer by layer']}", file=sys.stderr)
    return point.layerwise_possible


def announce(
    model: str | Path,
    recipe: str | Recipe,
    kv_ratios: Sequence[float],
    out: str | Path | None,
    *,
    layerwise: bool | None,
    **settings: Any,
) -> None:
    """Say on stderr what a conversion will take, before it begins. Arguments as of `estimate_conversion`; `layerwise`:
    as asked for, None: wherever it does not fit in memory.

    Raises ConfigError where memory or disk do not suffice.
    """
    points = estimate_conversions(model, recipe, kv_ratios, **settings)
    first = points[0]
    for note in filter(None, (point.ceiling for point in points)):
        print(note, file=sys.stderr, flush=True)
    if layerwise is None:
        layerwise = len(kv_ratios) == 1 and out is not None and first.layerwise_possible and first.too_large
    one_layer = sum((point.layer_by_layer for point in points), Estimate())
    total = one_layer if layerwise else sum((point.in_memory for point in points), Estimate())
    if out is None:
        total = Estimate(total.memory, seconds=total.seconds)
    print(f"estimate: {total.describe()}", file=sys.stderr, flush=True)
    if first.available and total.memory > first.available:
        other = f"layer by layer it would be {gib(one_layer.memory)}" if first.layerwise_possible else first.why_not
        raise ConfigError(
            f"memory: this conversion does not fit: it takes about {gib(total.memory)}, and {gib(first.available)} are "
            f"available; {other}; fewer calibration tokens or another machine would do"
        )
    disk, free = total.disk + total.scratch, math.inf if out is None else disk_free(Path(out))
    if 0 < free < disk:  # none at all is free where nothing can be written, which is told as that
        raise ConfigError(
            f"out: the result does not fit: it takes about {gib(disk)}, and {gib(free)} are free at {str(out)!r}; "
            "free some, or give another folder"
        )
