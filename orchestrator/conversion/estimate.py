"""What a conversion will take, from the checkpoint's config alone, before it is run; and whether it fits."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attention.base.text import gib
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.one_layer import check_layerwise
from orchestrator.conversion.request import ConversionRequest
from orchestrator.resources.estimate import ConversionEstimate, Estimate, Machine
from orchestrator.resources.size import Conversion
from orchestrator.storage.paths import disk_free


def estimate_conversions(request: ConversionRequest, *, elsewhere: Machine | None = None) -> list[ConversionEstimate]:
    """Return the estimate of each conversion that a request comes to, in falling order of their budgets.

    No weights are read. `elsewhere`: on that machine, which need not be there.
    """
    machine = elsewhere or Machine.here(checkpoints.device_of(request.device))
    working = request.working if elsewhere is None else request.written
    why_not = _why_not_layerwise(request)
    points = []
    for budget, requested in request.distinct(report=True).items():
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


@dataclass(frozen=True)
class RunEstimate:
    """What a run of `convert` will take, and how it is done.

    Attributes:
        points: The estimate of each KV ratio.
        layerwise: Whether it is done layer by layer.
        turned: Whether that was looked at because it does not fit in memory.
        folder: Where it is written, if anywhere.
    """

    points: tuple[ConversionEstimate, ...]
    layerwise: bool
    turned: bool
    folder: Path | None

    @classmethod
    def of(
        cls,
        points: Sequence[ConversionEstimate],
        folder: str | Path | None,
        *,
        several: bool,
        layerwise: bool | None,
    ) -> RunEstimate:
        """Decide how a run is done: as `layerwise` says, or, where that is None, in memory if it fits.

        `several`: whether ratios are converted from one calibration, which is done in memory alone.
        """
        first = points[0]
        turned = layerwise is None and not several and folder is not None and first.too_large
        by_layer = bool(layerwise) or (turned and first.layerwise_possible)
        return cls(tuple(points), by_layer, turned, None if folder is None else Path(folder))

    @property
    def total(self) -> Estimate:
        """What all of it takes, done one conversion after the other."""
        parts = [point.layer_by_layer if self.layerwise else point.in_memory for point in self.points]
        total = sum(parts, Estimate())
        return total if self.folder is not None else Estimate(total.memory, seconds=total.seconds)

    def announce(self) -> None:
        """Print on stderr what it will take. Raises ConfigError where memory or disk do not suffice."""
        first = self.points[0]
        for note in filter(None, (point.ceiling for point in self.points)):
            print(note, file=sys.stderr, flush=True)
        total = self.total
        print(f"estimate: {total.describe()}", file=sys.stderr, flush=True)
        if first.available and total.memory > first.available:
            one_layer = sum((point.layer_by_layer for point in self.points), Estimate())
            other = f"layer by layer it would be {gib(one_layer.memory)}" if first.layerwise_possible else first.why_not
            raise ConfigError(
                f"memory: this conversion does not fit: it takes about {gib(total.memory)}, and "
                f"{gib(first.available)} are available; {other}; fewer calibration tokens or another machine would do"
            )
        disk = total.disk + total.scratch
        free = math.inf if self.folder is None else disk_free(self.folder)
        if 0 < free < disk:  # none at all is free where nothing can be written, which is told as that
            raise ConfigError(
                f"out: the result does not fit: it takes about {gib(disk)}, and {gib(free)} are free at "
                f"{str(self.folder)!r}; free some, or give another folder"
            )

    def explain(self) -> None:
        """Print on stderr why it is done layer by layer, or that it cannot be."""
        if not self.turned:
            return
        words = self.points[0].describe()
        about = f"about {words['in memory']}, {words['available now']} available; layer by layer: "
        print(f"this conversion would take {about}{words['layer by layer']}", file=sys.stderr)
