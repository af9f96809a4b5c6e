"""What plans are made from: the heads, their statistics, and a way to measure a whole model.

Legend: L layers, H query heads, U stored KV heads a layer (units).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.calibration.store import Calibration
from attention.conversion.conversion import convert
from attention.conversion.refinement.local import (
    FIT_RATE,
    FIT_TOKENS,
    FitTexts,
    LayerTask,
    fit_module,
    output_errors,
)
from attention.conversion.refinement.parallel import each_layer
from attention.conversion.refinement.refine import Work, refine
from attention.conversion.sensitivity import expected_cost, output_metrics
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.modeling.losses import language_loss
from attention.modeling.mlp import MlpWeights, mlp_sites, read
from attention.plan import AttentionPlan, LayerPlan
from attention.plan_parts import groups_of
from search_spaces.planning.loss_increases import LayerTrials
from search_spaces.recipes.recipe import Recipe

ESTIMATED, MEASURED = "estimated", "measured"  # ways to know the loss increase of one layer
FIT_DECAY = 1 / 3
"""In a local fit of a layer with fused keys the error falls as the number of steps to the power -FIT_DECAY, from 60 to
480 steps (benchmarks/LOG.md: medians of three checkpoints)."""


@dataclass(frozen=True)
class PlanningContext:
    """What plans are made from.

    `heads`: lifted, one entry a layer (`attention.conversion.conversion.lift`). `calibration` for parts that need
    statistics; `model` for the layer-output score (rotary tables); `model` and `sequences` `[N, T]` for whole-model
    scores and measured curves. `cache_dir`: folder where measured curves are kept, beside `curves` in memory.
    `fusion_distances`: of DHA's search phase, `[L, H, H]` for "key" and "value"; `output_metrics`: of
    `attention.conversion.sensitivity`, worked out from the model where they are not given. `work`: of
    each fit so far. Raises ValueError if heads or statistics do not fit the geometry.
    """

    geometry: HeadGeometry
    heads: Sequence[LayerHeads]
    calibration: Calibration | None = None
    model: PreTrainedModel | None = None
    sequences: Tensor | None = None
    cache_dir: str | Path | None = None
    fusion_distances: Mapping[str, np.ndarray] | None = None
    output_metrics: Sequence[Tensor] | None = None
    work: list[Work] = field(default_factory=list, repr=False, compare=False)
    curves: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)
    _similarities: dict[Any, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    _trials: dict[int, LayerTrials] = field(default_factory=dict, repr=False, compare=False)
    _tasks: dict[int, LayerTask] = field(default_factory=dict, repr=False, compare=False)
    _metrics: dict[int, list[Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        layers, heads = self.geometry.num_layers, self.geometry.num_heads
        counts = {(h.num_heads, h.k.shape[0], h.v.shape[0]) for h in self.heads}
        if len(self.heads) != layers or counts != {(heads, heads, heads)}:
            raise ValueError(
                f"expected {layers} layers of {heads} lifted heads, got {len(self.heads)} layers of {sorted(counts)}; "
                "use attention.conversion.conversion.lift"
            )
        if self.calibration is not None and len(self.calibration.layers) != layers:
            raise ValueError(f"the calibration has {len(self.calibration.layers)} layers, the model {layers}")

    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The query heads of each stored KV head."""
        return groups_of(self.geometry.kv_map)

    def loss_of(self, recipe: Recipe, plan: AttentionPlan, refinement: Mapping[str, Any] | None = None) -> float:
        """Loss in nats a token of the model converted with the recipe's alignment and fusion, and with its refinement
        if that is given settings (`refinement`). Raises ValueError without a model or sequences."""
        if self.model is None or self.sequences is None:
            raise ValueError(f"recipe {recipe.name} measures whole models; the context needs a model and sequences")
        converted = convert_with(recipe, self.model, plan, self.calibration, share=True)
        if refinement is not None:
            fits = refine(recipe.refinement, self.model, converted, self.sequences, refinement)
            self.work.extend(fit.work for fit in fits)
        return language_loss(converted, self.sequences)

    def measured_on(self, tokens: int) -> Tensor:
        """The first sequences, about `tokens` tokens and at least one. Raises ValueError without model or sequences."""
        if self.model is None or self.sequences is None:
            raise ValueError("measuring the increase of the loss needs a model and sequences in the context")
        return self.sequences[: max(1, tokens // self.sequences.shape[1])]

    def increases_of(
        self,
        recipe: Recipe,
        plans: Sequence[AttentionPlan],
        layer: int,
        *,
        tokens: int,
        fit_steps: int = 0,
        refined_steps: int = 0,
        increases: str = MEASURED,
    ) -> list[float]:
        """Loss increase in nats a token if only `layer` follows a plan, of each of `plans`, with the recipe's alignment
        and fusion.

        `increases`: MEASURED by running the whole model, or ESTIMATED from the error of the attention's output
        (`attention.conversion.sensitivity`). With `fit_steps` the layer is first fitted to the original's output for so
        many steps, as refinement will do: a fit takes away most of what fused keys cost, and little of what values do.
        So nothing is fitted for an estimate where keys stay as they are. Where they are fused the estimate is scaled by
        FIT_DECAY from `fit_steps` to the `refined_steps` of the refinement, if these are more. Raises ValueError
        without model or sequences.
        """
        if tokens not in self._trials:
            self._trials[tokens] = LayerTrials(self.model, self.measured_on(tokens))  # type: ignore[arg-type]
        trials, own = self._trials[tokens], self.geometry.kv_map

        def fused(plan: LayerPlan) -> LayerHeads:
            heads = self.heads[layer]
            statistics = self.calibration.layers[layer] if self.calibration else None
            for axis in ("alignment", "fusion"):
                heads = recipe.apply(axis, heads, plan, statistics, self.geometry.layer(layer))
            return heads

        def module(plan: LayerPlan, fit: bool) -> nn.Module:
            made = trials.module(layer, fused(plan), plan)
            if fit:
                generator = torch.Generator().manual_seed(layer)
                shared_by = self.geometry.num_kv_heads / plan.key_heads
                task = self._task(layer)
                self.work.append(fit_module(made, task, fit_steps, FIT_RATE, generator, shared_by=shared_by)[-1])
            return made

        def estimated(plan: LayerPlan) -> float:
            fit = bool(fit_steps) and plan.key_map != own
            made = module(plan, fit)
            still_falls = (fit_steps / max(fit_steps, refined_steps)) ** FIT_DECAY if fit else 1.0
            return still_falls * expected_cost(metric, output_errors(made, self._task(layer).check))

        def measured(plan: LayerPlan) -> float:
            if fit_steps:
                return trials.increase(layer, trials.heads_of(module(plan, fit=True), plan))
            return trials.increase(layer, fused(plan).expand(plan.key_map, plan.value_map))

        asked = [plan.layers[layer] for plan in plans]
        if increases == MEASURED:
            return [measured(plan) for plan in asked]
        metric, _ = self._metric(layer, tokens), self._task(layer)  # made before several threads ask for them
        size = sum(p.numel() for p in trials.modules[layer].parameters())
        return each_layer(len(asked), lambda i: estimated(asked[i]), size, trials.model.device)

    def _task(self, layer: int) -> LayerTask:
        """What a layer is fitted to; only the last one asked for is kept."""
        if layer not in self._tasks:
            self._tasks.clear()
            self._tasks[layer] = LayerTask.of(self._fit_texts, layer)
        return self._tasks[layer]

    @cached_property
    def _fit_texts(self) -> FitTexts:
        return FitTexts.of(self.model, self.measured_on(FIT_TOKENS))  # type: ignore[arg-type]

    def _metric(self, layer: int, tokens: int) -> Tensor:
        if self.output_metrics is not None:
            return self.output_metrics[layer]
        if tokens not in self._metrics:
            self._metrics[tokens] = output_metrics(self.model, self.measured_on(tokens))  # type: ignore[arg-type]
        return self._metrics[tokens][layer]

    def fusion_distance(self, layer: int, sides: Sequence[str]) -> np.ndarray | None:
        """L_head of Eq. 7 (paper 000) of a layer's units, summed over `sides`, `[U, U]`; None if not there."""
        if self.fusion_distances is None:
            return None
        first = [unit[0] for unit in self.units]
        return sum(self.fusion_distances[side][layer][np.ix_(first, first)] for side in sides)  # type: ignore[return-value]

    def mlps(self) -> list[MlpWeights]:
        """The MLP of every layer. Raises ValueError without a model."""
        if self.model is None:
            raise ValueError("sharing.mlp=true compares MLPs; the context needs a model")
        return [read(site) for site in mlp_sites(self.model)]

    def similarity(self, recipe: Recipe, layer: int, side: str) -> np.ndarray:
        """The recipe's similarity of the units of one side, `[U, U]`, kept for the next recipe that asks."""
        key = (recipe.similarity, tuple(sorted(recipe.knobs("similarity").items())), layer, side)
        if key not in self._similarities:
            statistics = self.calibration.layers[layer] if self.calibration else None
            full = recipe.apply("similarity", self.heads[layer], statistics, self.geometry.layer(layer), side)
            first = [unit[0] for unit in self.units]  # the heads of a unit are identical
            self._similarities[key] = full.double().cpu().numpy()[np.ix_(first, first)]
        return self._similarities[key]


def convert_with(
    recipe: Recipe,
    model: PreTrainedModel,
    plan: AttentionPlan,
    calibration: Calibration | None,
    *,
    share: bool = False,
) -> PreTrainedModel:
    """Carry out a plan as the recipe's alignment and fusion say; refinement comes after it. `share`: what is outside of
    attention stays `model`'s memory, for a result that is not trained."""
    return convert(
        model,
        plan,
        alignment=recipe.alignment,
        fusion=recipe.fusion,
        calibration=calibration,
        alignment_settings=recipe.knobs("alignment"),
        fusion_settings=recipe.knobs("fusion"),
        share=share,
    )
