"""A checkpoint on disk, read one decoder layer at a time, and which recipes can be converted so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from attention.base.progress import stage
from attention.io.layers.windows import LazyWeights, check_windows, embed, open_window
from attention.modeling.running import layer_batch
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.request import ConversionRequest
from search_spaces.planning.budgets import LOOKS_AT_WEIGHTS
from search_spaces.planning.loss_increases import ESTIMATED_INCREASE
from search_spaces.recipes.recipe import Recipe
from search_spaces.site import FUSION_DISTANCES


def check_layerwise(recipe: Recipe, config: PretrainedConfig) -> None:
    """Check that `recipe` needs one layer at a time.

    Raises:
        ConfigError: If it needs more; it says which setting to change.
        ValueError: For a checkpoint whose layers cannot stand alone.
    """
    check_windows(config)
    parts = recipe.parts()
    wrong: list[tuple[str, str, str]] = []
    if recipe.measures_increases:
        if recipe.knobs("allocation")["increases"] != ESTIMATED_INCREASE:
            wrong.append(("allocation.increases", "runs the whole model", ESTIMATED_INCREASE))
    elif parts["allocation"].needs & LOOKS_AT_WEIGHTS:
        wrong.append(("allocation", "looks at all layers before any gets its heads", "uniform"))
    if recipe.objective is not None and parts["objective"].needs & {"measure", FUSION_DISTANCES}:
        wrong.append(("objective", "runs the whole model", "least_squares"))
    if recipe.sharing != "none":
        wrong.append(("sharing", "compares the heads of all layers", "none"))
    if recipe.composition != "none":
        wrong.append(("composition", "is for a training, which holds the whole model", "none"))
    if wrong:
        why = ", ".join(f"{name}={_value(recipe, name)} {reason}" for name, reason, _ in wrong)
        instead = " ".join(f"--set {axis}={other}" for axis, _, other in wrong)
        raise ConfigError(
            f"recipe {recipe.name} cannot be converted layer by layer: {why}. Add {instead}, or "
            "take another recipe (headfold, headfold_gqa, least_squares, align, asymgqa, gqa), or "
            "convert in memory: --no-layerwise"
        )


def _value(recipe: Recipe, name: str) -> Any:
    axis, _, knob = name.partition(".")
    return recipe.knobs(axis)[knob] if knob else getattr(recipe, axis)


class LayerSource:
    """The layers of a checkpoint on disk, each a separate model (`attention.io.layers.windows`).

    Attributes:
        request: The conversion.
        weights: Those of the checkpoint.
        device: The device to compute on.
        batch_size: Sequences at once.
        log: Takes lines of progress.
        phases: Takes the seconds of each phase.
    """

    def __init__(self, request: ConversionRequest, length: int, log: Callable[[str], None]) -> None:
        self.request = request
        self.weights = LazyWeights(request.checkpoint.folder, request.config)
        self.device = checkpoints.device_of(request.device)
        self.batch_size = layer_batch(request.geometry.num_heads, length)
        self.log = log
        self.phases = request.phases

    @contextmanager
    def phase(self, name: str, layer: int, doing: str) -> Iterator[None]:
        """Count the seconds of the body under `name`, and show it as `doing` of layer `layer`."""
        layers = self.request.geometry.num_layers
        with self.phases(name), stage(f"layer {layer + 1} of {layers}, {doing}"):
            yield

    def embed(self, tokens: Tensor, weights: LazyWeights | None = None) -> Tensor:
        """Return what enters layer 0 for `tokens` `[N, T]`: `[N, T, D]`."""
        request = self.request
        return embed(
            weights or self.weights,
            request.config,
            tokens,
            request.working,
            self.device,
            self.batch_size,
        )

    def window(self, layer: int, streams: Tensor) -> PreTrainedModel:
        """Return layer `layer` as a model that is fed by `streams` `[N, T, D]`."""
        request = self.request
        return open_window(
            self.weights, request.config, layer, streams, request.working, self.device
        )
