"""Error curves.

The measured increase of the loss for each head count of a site, with the partition that was
measured.

Legend: U stored KV heads per layer (units).

A curve does not depend on the KV ratio, so all ratios share it, in memory and on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from attention.base.progress import stage
from attention.calibration.calibrate import calibration_digest, weights_of
from attention.conversion.refinement.local import FIT_RATE, SHORT_FIT_WINDOWS, STEP_TOKENS
from attention.conversion.refinement.windows import windows
from attention.io.file_lock import file_lock
from attention.io.files import write_whole
from search_spaces.partitions import Partition
from search_spaces.planning.context import PlanningContext
from search_spaces.planning.prices import digest_of
from search_spaces.recipes.recipe import Recipe
from search_spaces.site import FUSION_DISTANCES, SIDES

# Axes that what is measured depends on.
DECIDES = ("grouping", "objective", "similarity", "alignment", "fusion")


class CurvePoint(NamedTuple):
    """One measured point of a curve."""

    increase: float
    partition: Partition


class CurveSite(NamedTuple):
    """A place where heads are grouped: the sides ("key", "value", or both alike) of one layer."""

    layer: int
    sides: tuple[str, ...]


class Curves:
    """Curves of one recipe on one context, over sites of `units` heads.

    Args:
        group: `group(site, count)` is the recipe's partition of a site's units.
        measure: `measure(partitions, report)` is the increase of the loss with each of these alone;
            it calls `report` after each.
        points: The measured points; new ones are added to it.
        file: Where points are stored, or None.
        prepare: Called before the first point that is missing.
        units: Units per site.
        at_once: Layers whose increases are measured together.
    """

    def __init__(
        self,
        group: Callable[[CurveSite, int], Partition],
        measure: Callable[
            [Sequence[tuple[CurveSite, Partition]], Callable[[], None]], Sequence[float]
        ],
        points: dict[str, CurvePoint],
        file: Path | None = None,
        prepare: Callable[[], None] = lambda: None,
        *,
        units: int,
        at_once: int = 1,
    ) -> None:
        self._group = group
        self._measure = measure
        self.file = file
        self._prepare = prepare
        self._units = units
        self._at_once = at_once
        self.points = points
        points.update(_read(file))

    @classmethod
    def of_points(cls, points: Mapping[str, CurvePoint], *, units: int) -> Curves:
        """Return curves of which all points are given."""

        def group(site: CurveSite, count: int) -> Partition:
            raise KeyError(point_key(*site, count))

        return cls(group, lambda partitions, report: [], dict(points), units=units)

    def of(
        self, sites: Sequence[CurveSite], counts: Sequence[int], *, shown: bool = True
    ) -> list[dict[int, float]]:
        """Return the loss increase in nats per token of each site for each count.

        0 if all units stay.

        Args:
            sites: The sites.
            counts: Head counts.
            shown: Whether to show progress.
        """
        missing = [
            (p, c)
            for p in sites
            for c in counts
            if c != self._units and point_key(*p, c) not in self.points
        ]
        layers = list(dict.fromkeys(site.layer for site, _ in missing))
        if missing:
            self._prepare()
        showing = (
            stage("what each head count costs", len(missing), "head counts")
            if shown
            else nullcontext()
        )
        with showing as progress:
            for first in range(0, len(layers), self._at_once):
                together = layers[first : first + self._at_once]
                step = progress.step if progress else lambda: None
                self._add(
                    [(site, count) for site, count in missing if site.layer in together], step
                )
        return [
            {
                c: 0.0 if c == self._units else self.points[point_key(*site, c)].increase
                for c in counts
            }
            for site in sites
        ]

    def _add(self, missing: Sequence[tuple[CurveSite, int]], report: Callable[[], None]) -> None:
        partitions = [self._group(site, count) for site, count in missing]
        increases = self._measure(
            [(site, p) for (site, _), p in zip(missing, partitions, strict=True)], report
        )
        for (site, count), increase, partition in zip(missing, increases, partitions, strict=True):
            self.points[point_key(*site, count)] = CurvePoint(increase, partition)
        self._save()

    def whole(self, plan: Any, measure: Callable[[], float]) -> float:
        """Return a measured loss of the whole model.

        Args:
            plan: As plain values, everything besides the curves that it depends on.
        """
        key = f"whole/{hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:24]}"
        if key not in self.points:
            self.points[key] = CurvePoint(measure(), ())
            self._save()
        return self.points[key].increase

    def partition(self, site: CurveSite, count: int) -> Partition | None:
        """Return the partition that was measured, or None."""
        point = self.points.get(point_key(*site, count))
        return None if point is None else point.partition

    def _save(self) -> None:
        if self.file is None:
            return
        with file_lock(self.file.parent / ".lock"):
            # What another process has measured meanwhile stays; equal points are equal by
            # construction.
            self.points.update({**_read(self.file), **self.points})
            write_whole(self.file, json.dumps(self.points, sort_keys=True).encode())


def side_curves(
    curves: Curves,
    recipe: Recipe,
    sites: Sequence[tuple[int, str]],
    counts: Sequence[int],
    *,
    shown: bool = True,
) -> list[dict[int, float]]:
    """Return the loss increases if only one site is grouped, for each site and count.

    Args:
        curves: Those of the recipe.
        recipe: Groups both sides together or apart.
        sites: (layer, side); `side` may be "both".
        counts: Head counts.
        shown: As in `Curves.of`.
    """
    both = (SIDES,) if recipe.together else tuple((side,) for side in SIDES)
    curve_sites = [
        [CurveSite(layer, sides) for sides in (both if side == "both" else ((side,),))]
        for layer, side in sites
    ]
    results = iter(curves.of([site for each in curve_sites for site in each], counts, shown=shown))
    summed = [[next(results) for _ in each] for each in curve_sites]
    return [{count: sum(curve[count] for curve in each) for count in counts} for each in summed]


def curve_name(
    recipe: Recipe, context: PlanningContext, knobs: dict[str, int], seed_of: str
) -> str:
    """Return a name that holds all that curves depend on.

    `knobs` are those of the measurement; `seed_of` stands for the random generator of the grouping.
    """
    measured_on = None
    if context.model is not None and context.sequences is not None:
        # Known where there is a calibration: to hash a large model takes longer than to plan it.
        weights = context.calibration.weights if context.calibration else weights_of(context.model)
        measured_on = calibration_digest(
            context.model.config, weights, context.sequences, 0, context.model.dtype
        )
    record: dict[str, Any] = {
        "axes": {axis: [getattr(recipe, axis), recipe.knobs(axis)] for axis in DECIDES},
        "by": [recipe.together, recipe.by, *([recipe.width] if recipe.width != 1 else [])],
        "calibration": None if context.calibration is None else context.calibration.digest,
        "measured on": measured_on,
        "knobs": {**knobs, "step_tokens": STEP_TOKENS, "fit_rate": FIT_RATE, **_windowed(context)},
        "seed": seed_of,
    }
    if FUSION_DISTANCES in recipe.needs and context.fusion_distances is not None:
        distances = context.fusion_distances
        record["fusion distances"] = {side: digest_of(distances[side]) for side in distances}
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:24]


def _windowed(context: PlanningContext) -> dict[str, int]:
    """Into how many parts a local fit cuts long sequences, and how many of them are looked at here.

    Nothing where it takes them whole.
    """
    parts = (
        1 if context.sequences is None else len(windows(context.sequences.shape[1], STEP_TOKENS))
    )
    return {"parts": parts, "near": SHORT_FIT_WINDOWS} if parts > 1 else {}


def point_key(layer: int, sides: tuple[str, ...], count: int) -> str:
    """Return the key of a point in files and dictionaries."""
    return f"{layer}/{'+'.join(sides)}/{count}"


def expected_increases(
    recipe: Recipe, counts: Sequence[tuple[int, int]], units: int, points: Mapping[str, CurvePoint]
) -> list[float]:
    """Return the loss increase that `points` expect of each layer with its `counts`.

    They are (key heads, value heads) of each layer.
    """

    def of(layer: int, sides: tuple[str, ...], count: int) -> float:
        return 0.0 if count == units else points[point_key(layer, sides, count)].increase

    if recipe.together:
        return [of(layer, SIDES, keys) for layer, (keys, _) in enumerate(counts)]
    return [
        sum(of(i, (side,), n) for side, n in zip(SIDES, kept_count, strict=True))
        for i, kept_count in enumerate(counts)
    ]


def points_of(record: Mapping[str, Any]) -> dict[str, CurvePoint]:
    """Points from plain JSON values."""
    return {
        key: CurvePoint(increase, tuple(tuple(group) for group in groups))
        for key, (increase, groups) in record.items()
    }


def _read(file: Path | None) -> dict[str, CurvePoint]:
    """Return the points of a file.

    None if it is missing or damaged, since they can be measured again.
    """
    try:
        record: dict[str, Any] = (
            json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
        )
        return points_of(record)
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
