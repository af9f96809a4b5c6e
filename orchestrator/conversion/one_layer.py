"""One layer of a conversion layer by layer: calibrate, plan, convert, refine, and carry the streams on. Which recipes
and checkpoints can be converted so, and how many sequences at once.

Legend: N sequences of T tokens, the first C of them for calibration, the others for the held-out loss; D model dim.

It is `orchestrator.conversion.memory_store` on a window (`attention.io.layers.windows`): one layer in place of all. What
depends on other layers comes in as data: both models' streams, the layer's head counts, generators and number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from attention.base.memory import release_memory
from attention.calibration.calibrate import calibrate
from attention.calibration.sizes import SAMPLE_TOKENS
from attention.conversion.convert import lift
from attention.families import geometry_of
from attention.io.checkpoint import to_plain
from attention.io.experts import published
from attention.io.layers.windows import (
    LazyWeights,
    OutputHead,
    advance,
    check_windows,
    feed,
    layer_prefix,
    of_layer,
    open_window,
    rows_of,
)
from attention.io.precision import cast_weights, round_weights
from attention.modeling.grouped import cache_bytes
from attention.modeling.growing_cache import cache_of
from attention.modeling.predictions import in_chunks, positions_at_once
from attention.plan import AttentionPlan, LayerPlan
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.execution import refine_with
from orchestrator.conversion.request import ConversionRequest
from search_spaces.allocation.problem import Counts
from search_spaces.planning.budgets import LOOKS_AT_WEIGHTS
from search_spaces.planning.by_layer import plan_layer
from search_spaces.planning.context import PlanningContext, convert_with
from search_spaces.planning.loss_increases import ESTIMATED_INCREASE
from search_spaces.recipes.recipe import Recipe
from trainers.evaluation import PredictionCosts, comparison


def check_layerwise(recipe: Recipe, config: PretrainedConfig) -> None:
    """Raise ConfigError saying which setting to change if a conversion by `recipe` needs more than one layer at once,
    and ValueError for a checkpoint whose layers cannot stand alone."""
    check_windows(config)
    parts, wrong = recipe.parts(), []
    if "measure" in parts["allocation"].needs:
        if recipe.knobs("allocation")["increases"] != ESTIMATED_INCREASE:
            wrong.append(("allocation.increases", "runs the whole model", ESTIMATED_INCREASE))
    elif parts["allocation"].needs & LOOKS_AT_WEIGHTS:
        wrong.append(("allocation", "looks at all layers before any gets its heads", "uniform"))
    if recipe.objective is not None and parts["objective"].needs & {"measure", "fusion_distances"}:
        wrong.append(("objective", "runs the whole model", "least_squares"))
    if recipe.sharing != "none":
        wrong.append(("sharing", "compares the heads of all layers", "none"))
    if recipe.composition != "none":
        wrong.append(("composition", "is for a training, which holds the whole model", "none"))
    if wrong:
        why = ", ".join(f"{name}={_value(recipe, name)} {reason}" for name, reason, _ in wrong)
        instead = " ".join(f"--set {axis}={other}" for axis, _, other in wrong)
        raise ConfigError(
            f"recipe {recipe.name} cannot be converted layer by layer: {why}. Add {instead}, or take another recipe "
            "(headfold, headfold_gqa, least_squares, align, asymgqa, gqa), or convert in memory: --no-layerwise"
        )


def _value(recipe: Recipe, name: str) -> Any:
    axis, _, knob = name.partition(".")
    return recipe.knobs(axis)[knob] if knob else getattr(recipe, axis)


@dataclass(frozen=True)
class Layer:
    """What became of one layer. `tensors`: its weights by their names in the whole model; `fits` of its refinement as
    plain values; `cache_bytes`: what its cache holds after one sequence."""

    plan: LayerPlan
    tensors: dict[str, Tensor]
    fits: list[dict[str, Any]]
    cache_bytes: int

    def facts(self) -> dict[str, Any]:
        """All but the tensors, as plain values."""
        maps = {"key_map": list(self.plan.key_map), "value_map": list(self.plan.value_map)}
        return maps | {"fits": self.fits, "cache_bytes": self.cache_bytes}


@dataclass(frozen=True)
class LayerwiseConversion:
    """What all layers share. `planned`: the plan, or the head counts of all layers where each is planned by itself with
    its `generators` (`search_spaces.planning.planner`); `calibration`: C; `plain`: whether layers are written in the
    plain family's form; `layer_steps`: of the local fit of each layer, where they are not the recipe's for all."""

    request: ConversionRequest
    weights: LazyWeights
    planned: AttentionPlan | Counts
    generators: list[np.random.Generator]
    calibration: int
    plain: bool
    batch_size: int
    layer_steps: Sequence[int] | None = None

    @property
    def device(self) -> torch.device:
        return checkpoints.device_of(self.request.device)

    def convert(self, layer: int, original: Tensor, converted: Tensor) -> Layer:
        """Convert layer `layer`. Both streams `[N, T, D]` enter it, and are changed in place to what leaves it."""
        request = self.request
        with request.layer_phase("load", layer, "reading weights"):
            window = open_window(self.weights, request.config, layer, original, request.working, self.device)
        rows = rows_of(original, self.calibration)
        new, plan = self._converted(window, layer, rows)
        feed(new, converted)
        with request.layer_phase("refine", layer, "refining"):
            steps = None if self.layer_steps is None else [self.layer_steps[layer]]
            fits = refine_with(request.recipe, window, new, rows, first=layer, layer_steps=steps)
        round_weights(new, request.written)  # before the converted stream runs through
        with request.layer_phase("carry on", layer, "running both models"):
            advance(window, original, self.batch_size)
            del window
            advance(new, converted, self.batch_size)
        cast_weights(new, request.written)
        held = _cache_bytes(new, rows_of(converted, 1))
        with request.layer_phase("save", layer, "writing"):
            tensors = self._tensors(new, layer)
        del new
        release_memory()  # a window and the hooks that feed it know each other too
        return Layer(plan, tensors, [asdict(fit) for fit in fits], held)

    def _converted(self, window: PreTrainedModel, layer: int, rows: Tensor) -> tuple[PreTrainedModel, LayerPlan]:
        request, calibration = self.request, None
        recipe = request.recipe
        if "statistics" in recipe.needs:
            with request.layer_phase("calibrate", layer, "calibrating"):
                sampled = SAMPLE_TOKENS if "inputs" in recipe.needs else 0
                calibration = calibrate(window, rows, sample_tokens=sampled, batch_size=self.batch_size)
        geometry = geometry_of(window.config)
        release_memory()
        if isinstance(self.planned, AttentionPlan):
            plan = self.planned.layers[layer]
        else:
            with request.layer_phase("plan", layer, "grouping heads"):
                context = PlanningContext(geometry, lift(window), calibration, window, rows)
                sites = self.generators[2 * layer : 2 * layer + 2]
                plan = plan_layer(recipe, self.planned[layer], context, sites)
                del context
                # An objective and the site that it judges know each other, and hold the layer's Gram matrices.
                release_memory()
        # All weights of the new window are copied or written, so none need be drawn first.
        with request.layer_phase("convert", layer, "fusing heads"), no_init_weights():
            new = convert_with(recipe, window, AttentionPlan((plan,), geometry.head_dim), calibration)
        return new.requires_grad_(False), plan

    def _tensors(self, new: PreTrainedModel, layer: int) -> dict[str, Tensor]:
        if self.plain:
            with no_init_weights():
                new = to_plain(new)
        prefix = layer_prefix(new)
        tensors = {name: t for name, t in new.state_dict().items() if name.startswith(prefix)}
        return {of_layer(name, prefix, layer): tensor for name, tensor in published(new, tensors).items()}


@torch.no_grad()
def _cache_bytes(model: PreTrainedModel, rows: Tensor) -> int:
    return cache_bytes(cache_of(model(rows.to(model.device), use_cache=True)))


@torch.no_grad()
def score(
    head: OutputHead, original: Tensor, converted: Tensor, tokens: Tensor, rounded: OutputHead | None = None
) -> dict[str, Any]:
    """Held-out losses and KL in nats per token, from the streams `[N, T, D]` that leave the last layer, of `tokens`
    `[N, T]`. `rounded`: the head of the converted model, where it is another. Sums in float64, as in `evaluate`."""
    divergence = 0.0
    costs = PredictionCosts(), PredictionCosts()
    for rows in torch.arange(len(tokens)).split(max(1, positions_at_once(head.vocabulary) // tokens.shape[1])):
        ids = tokens[rows].long().to(head.device)
        before, after = head.final(original[rows]), (rounded or head).final(converted[rows])

        def both(logits: Tensor, labels: Tensor, expected: Tensor | None) -> Tensor:
            assert expected is not None  # the original's logits are always there
            costs[0](expected, labels, None)
            return costs[1](logits, labels, expected)

        divergence += float(in_chunks(after, ids, both, before)[1]) * len(rows) / len(tokens)
    original_losses, losses = (cost.of_rows(len(tokens)) for cost in costs)
    original_loss, loss = float(original_losses.mean()), float(losses.mean())
    worth = {"original_loss": original_loss, "loss": loss, "kl": divergence}
    return worth | comparison(loss, original_loss, losses, original_losses)
