"""The axis of loss increases: logarithmic, with a band for values of 0 or less."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from matplotlib.ticker import LogLocator

from orchestrator.reporting.figures.drawing import FAINT

INCREASE_LABEL = "loss increase, nats per token"
_MIN_START = 1e-4  # nats, of the logarithmic part
_MAX_START = 1.0
_BAND_LABEL = "0 or less"


class IncreaseAxis:
    """A logarithmic axis for some increases.

    An increase of 0 or less is drawn in a band at its low end, which has its own tick.

    Attributes:
        floor: The middle of that band.
    """

    def __init__(self, increases: Iterable[float]) -> None:
        positive = [x for x in increases if math.isfinite(x) and x > 0]
        self._low = max(_MIN_START, min([_MAX_START, *positive]) / 1.5)
        self._high = max([2 * self._low, *positive]) * 1.5
        band = (self._high / self._low) ** 0.09  # a tenth of the axis
        self._bottom = self._low / band**2
        self.floor = self._low / band

    def at(self, increase: float) -> float:
        """Return the coordinate of an increase."""
        return increase if increase >= self._low else self.floor

    def is_none(self, increase: float) -> bool:
        """Return whether an increase is drawn in the band."""
        return increase < self._low

    def put_on(self, axes: Any, which: Literal["x", "y"] = "y") -> None:
        """Set it as an axis of a plot."""
        axes.set(**{f"{which}scale": "log", f"{which}lim": (self._bottom, self._high)})
        draw_band = axes.axhspan if which == "y" else axes.axvspan
        draw_band(self._bottom, self._low, color=FAINT, alpha=0.3, lw=0, zorder=0)
        axis = axes.yaxis if which == "y" else axes.xaxis
        ticks = self._ticks()
        label = _BAND_LABEL
        if which == "x":  # where there is room for short words only
            label = label.replace(" or ", " or\n")
        axis.set_ticks([self.floor, *ticks], [label, *(f"+{x:g}" for x in ticks)])
        axis.set_ticks([], minor=True)

    def _ticks(self) -> list[float]:
        """Return powers of ten, and on a short axis 2 and 5 times these."""
        steps = (1.0, 2.0, 5.0) if self._high / self._low < 2e3 else (1.0,)
        return [
            x
            for x in LogLocator(subs=steps).tick_values(self._low, self._high)
            if self._low <= x <= self._high
        ]

    def perplexity(self, axes: Any) -> None:
        """Draw the factor of the perplexity, exp(increase), on the right."""
        other = axes.secondary_yaxis("right")
        ticks = self._ticks()
        other.set_yticks(ticks, [f"\N{MULTIPLICATION SIGN}{math.exp(x):.3g}" for x in ticks])
        other.set_yticks([], minor=True)
        other.set_ylabel("perplexity relative to the original")
