"""The axis of loss increases: logarithmic, with a place of its own for what is no increase."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from matplotlib.ticker import LogLocator

from orchestrator.reporting.figures.drawing import FAINT

INCREASE = "loss increase, nats per token"
LEAST, MOST = 1e-4, 1.0  # nats: the axis begins no lower, and begins below MOST
NONE = "0 or less"


class IncreaseAxis:
    """A logarithmic axis for some increases. An increase of 0 or less has no place on it: it is drawn in a band at its
    low end, which says so, with a mark of its own.

    `floor`: where the middle of that band is.
    """

    def __init__(self, increases: Iterable[float]) -> None:
        finite = [x for x in increases if math.isfinite(x)]
        positive = [x for x in finite if x > 0]
        self._low = max(LEAST, min([MOST, *positive]) / 1.5)
        self._high = max([2 * self._low, *positive]) * 1.5
        band = (self._high / self._low) ** 0.09  # a tenth of the axis
        self._bottom, self.floor = self._low / band**2, self._low / band

    def at(self, increase: float) -> float:
        """Where an increase is drawn."""
        return increase if increase >= self._low else self.floor

    def is_none(self, increase: float) -> bool:
        """Whether it is drawn in the band of those that are 0 or less (or less than LEAST)."""
        return increase < self._low

    def put_on(self, axes: Any, which: Literal["x", "y"] = "y") -> None:
        """Make it the axis `which` of a plot."""
        axes.set(**{f"{which}scale": "log", f"{which}lim": (self._bottom, self._high)})
        (axes.axhspan if which == "y" else axes.axvspan)(
            self._bottom, self._low, color=FAINT, alpha=0.3, lw=0, zorder=0
        )
        axis = axes.yaxis if which == "y" else axes.xaxis
        ticks = self._ticks()
        none = NONE if which == "y" else NONE.replace(" or ", " or\n")  # beside each other, ticks want short words
        axis.set_ticks([self.floor, *ticks], [none, *(f"+{x:g}" for x in ticks)])
        axis.set_ticks([], minor=True)

    def _ticks(self) -> list[float]:
        """Powers of ten, and on a short axis 2 and 5 times these."""
        steps = (1.0, 2.0, 5.0) if self._high / self._low < 2e3 else (1.0,)
        return [x for x in LogLocator(subs=steps).tick_values(self._low, self._high) if self._low <= x <= self._high]

    def perplexity(self, axes: Any) -> None:
        """On the right: by what the perplexity is multiplied, as exp(increase)."""
        other, ticks = axes.secondary_yaxis("right"), self._ticks()
        other.set_yticks(ticks, [f"x{math.exp(x):.3g}" for x in ticks])
        other.set_yticks([], minor=True)
        other.set_ylabel("perplexity, times the original's")
