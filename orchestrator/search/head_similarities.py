"""Which heads are alike, for a searcher that proposes plans itself: computed in the driver, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from search_spaces.recipes.recipe import Recipe
from search_spaces.site import SIDES

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Similarities:
    """A call loads the model and its statistics (cached before the first trial); only plain arrays stay.

    Holds paths and names alone, so that Tune can pickle a searcher that has one.
    """

    model: str
    dtype: str
    device: str
    calibration_file: str
    calibration_cache: str

    def __call__(self, recipe: Recipe) -> dict[tuple[int, str], np.ndarray]:
        """The recipe's similarity of the stored KV heads, `[U, U]`, by (layer, side)."""
        from attention.calibration.calibration import cached_calibration
        from orchestrator.conversion import loading
        from orchestrator.conversion.steps import planning_context
        from trainers.text.data import read_sequences

        model = loading.load_working(self.model, self.dtype, self.device)
        tokens = read_sequences(self.calibration_file)
        calibration = cached_calibration(model, tokens, self.calibration_cache)
        context = planning_context(model, calibration, tokens, None)
        layers = range(context.geometry.num_layers)
        return {(layer, side): context.similarity(recipe, layer, side) for layer in layers for side in SIDES}
