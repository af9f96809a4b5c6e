"""The inputs of a plan: the heads, their statistics, and a way to measure a whole model.

Legend: L layers, H query heads, U stored KV heads per layer (units).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from attention.calibration.store import Calibration, layer_statistics
from attention.conversion.convert import convert
from attention.conversion.refinement.local import FIT_TOKENS, FitTexts, LayerTask
from attention.conversion.refinement.original import Original
from attention.conversion.refinement.parallel import largest, layers_at_once
from attention.conversion.refinement.refine import FitWork, refine
from attention.conversion.sensitivity import output_metrics
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.modeling.losses import language_loss
from attention.modeling.mlp import MlpWeights, mlp_sites, read_mlp
from attention.plan import AttentionPlan
from attention.plan_parts import groups_of
from search_spaces.planning.loss_increases import LayerIncreases, LayerTrials, StepReport
from search_spaces.recipes.recipe import Recipe


@dataclass(frozen=True)
class PlanningContext:
    """The inputs of plans.

    `calibration` for parts that need statistics; `model` for the layer-output score (rotary
    tables); `model` and `sequences` `[N, T]` for whole-model scores and measured curves. Raises
    ValueError if heads or statistics do not fit the geometry.

    Attributes:
        heads: Lifted, one entry per layer (`attention.conversion.convert.lift`).
        cache_dir: Folder where measured curves are stored, in addition to `curves` in memory.
        fusion_distances: Of DHA's search phase, `[L, H, H]` for "key" and "value".
        output_metrics: Of `attention.conversion.sensitivity`, worked out from the model where they
            are not given.
        original: The model where others look at its layers too; else one that keeps nothing.
        first_layer: The number in its checkpoint of the model's first layer, where it is a window
            of a larger model.
        checkpoint_layers: Converted layers of its checkpoint; 0: as many as the model has.
        work: The work of all fits.
        increases: Increases of the loss that the curves predict for each layer of the plans made.
    """

    geometry: HeadGeometry
    heads: Sequence[LayerHeads]
    calibration: Calibration | None = None
    model: PreTrainedModel | None = None
    sequences: Tensor | None = None
    cache_dir: str | Path | None = None
    fusion_distances: Mapping[str, np.ndarray] | None = None
    output_metrics: Sequence[Tensor] | None = None
    original: Original | None = None
    first_layer: int = 0
    checkpoint_layers: int = 0
    work: list[FitWork] = field(default_factory=list[FitWork], repr=False, compare=False)
    increases: dict[AttentionPlan, list[float]] = field(
        default_factory=dict[AttentionPlan, list[float]], repr=False, compare=False
    )
    curves: dict[str, dict[str, Any]] = field(
        default_factory=dict[str, dict[str, Any]], repr=False, compare=False
    )
    _similarities: dict[Any, np.ndarray] = field(
        default_factory=dict[Any, np.ndarray], repr=False, compare=False
    )
    _trials: dict[int, LayerTrials] = field(
        default_factory=dict[int, LayerTrials], repr=False, compare=False
    )
    _metrics: dict[int, list[Tensor]] = field(
        default_factory=dict[int, list[Tensor]], repr=False, compare=False
    )

    def __post_init__(self) -> None:
        layers = self.geometry.num_layers
        heads = self.geometry.num_heads
        counts = {(h.num_heads, h.k.shape[0], h.v.shape[0]) for h in self.heads}
        if len(self.heads) != layers or counts != {(heads, heads, heads)}:
            raise ValueError(
                f"expected {layers} layers of {heads} lifted heads, got {len(self.heads)} layers "
                f"of {sorted(counts)}; "
                "use attention.conversion.convert.lift"
            )
        if self.calibration is not None and len(self.calibration.layers) != layers:
            raise ValueError(
                f"the calibration has {len(self.calibration.layers)} layers, the model {layers}"
            )

    @cached_property
    def original_layers(self) -> Original:
        """The model, by what its layers do on text. Raises ValueError without a model."""
        if self.model is None:
            raise ValueError("what layers do on text needs a model in the context")
        return self.original or Original.of(self.model)

    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The query heads of each stored KV head."""
        return groups_of(self.geometry.kv_map)

    def loss_of(
        self, recipe: Recipe, plan: AttentionPlan, refinement: Mapping[str, Any] | None = None
    ) -> float:
        """Return the loss of the model converted by the recipe with this plan, in nats per token.

        Args:
            recipe: Its alignment and fusion are used.
            plan: The plan.
            refinement: Settings of the recipe's refinement; None leaves it out.

        Raises:
            ValueError: Without a model or sequences.
        """
        if self.model is None or self.sequences is None:
            raise ValueError(
                f"recipe {recipe.name} measures whole models; the context needs a model and "
                f"sequences"
            )
        converted = convert_with(recipe, self.model, plan, self.calibration, share=True)
        if refinement is not None:
            fits = refine(
                recipe.refinement, self.original_layers, converted, self.sequences, refinement
            )
            self.work.extend(fit.work for fit in fits)
        return language_loss(converted, self.sequences)

    def measured_on(self, tokens: int, least: int = 1) -> Tensor:
        """Return the first sequences, about `tokens` tokens and at least `least` sequences.

        Raises:
            ValueError: Without model or sequences.
        """
        if self.model is None or self.sequences is None:
            raise ValueError(
                "measuring the increase of the loss needs a model and sequences in the context"
            )
        return self.sequences[: max(least, tokens // self.sequences.shape[1])]

    @property
    def layers_at_once(self) -> int:
        """Return how many layers' loss increases are best requested together.

        They are as many as are fitted at the same time.
        """
        if self.model is None:
            return 1
        modules = self.original_layers.modules
        return layers_at_once(len(modules), largest(modules), self.model.device)

    def increases_of(
        self,
        recipe: Recipe,
        plans: Sequence[tuple[int, AttentionPlan]],
        *,
        tokens: int,
        report: StepReport = lambda: None,
        **knobs: Any,
    ) -> list[float]:
        """Return the loss increase, in nats per token, if only one layer follows a plan.

        Args:
            recipe: Its alignment and fusion are used.
            plans: Each (`layer`, `plan`); best in ascending order of layers.
            tokens: About how many tokens to measure on.
            report: Called after each.
            **knobs: Steps and ways of `LayerIncreases`.

        Raises:
            ValueError: Without model or sequences.
        """
        single = LayerIncreases(
            recipe,
            self.trials(tokens),
            self.geometry,
            self.heads,
            self.calibration,
            task=lambda layer: LayerTask.of(self.fit_texts, layer),
            metric=lambda layer: self.output_metric(layer, tokens),
            work=self.work,
            first_layer=self.first_layer,
            **knobs,
        )
        return single.of(plans, report)

    def trials(self, tokens: int) -> LayerTrials:
        """Return the model with the heads of one layer exchanged, on about so many tokens."""
        if tokens not in self._trials:
            self._trials[tokens] = LayerTrials(self.model, self.measured_on(tokens))  # type: ignore[arg-type]
        return self._trials[tokens]

    @cached_property
    def fit_texts(self) -> FitTexts:
        """The texts that layers are fitted on before their loss increases are measured."""
        return FitTexts.of(self.original_layers, self.measured_on(FIT_TOKENS, least=2))

    def output_metric(self, layer: int, tokens: int) -> Tensor:
        """Return the metric of a layer (`attention.conversion.sensitivity`), on about `tokens`."""
        if self.output_metrics is not None:
            return self.output_metrics[layer]
        if tokens not in self._metrics:
            self._metrics[tokens] = output_metrics(self.model, self.measured_on(tokens))  # type: ignore[arg-type]
        return self._metrics[tokens][layer]

    def fusion_distance(self, layer: int, sides: Sequence[str]) -> np.ndarray | None:
        """L_head of Eq. 7 (DHA) of a layer's units, summed over `sides`, `[U, U]`.

        None if not there.
        """
        if self.fusion_distances is None:
            return None
        first = [unit[0] for unit in self.units]
        return sum(self.fusion_distances[side][layer][np.ix_(first, first)] for side in sides)  # type: ignore[return-value]

    def mlps(self) -> list[MlpWeights]:
        """Return the MLP of every layer. Raises ValueError without a model."""
        if self.model is None:
            raise ValueError("sharing.mlp=true compares MLPs; the context needs a model")
        return [read_mlp(site) for site in mlp_sites(self.model)]

    def similarity(self, recipe: Recipe, layer: int, side: str) -> np.ndarray:
        """Return the recipe's similarity of the units of one side, `[U, U]`; it is cached."""
        key = (recipe.similarity, tuple(sorted(recipe.knobs("similarity").items())), layer, side)
        if key not in self._similarities:
            heads = self.heads[layer]
            statistics = layer_statistics(self.calibration, layer, heads)
            full = recipe.apply("similarity", heads, statistics, self.geometry.layer(layer), side)
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
    """Carry out a plan as the recipe's alignment and fusion say; refinement comes after it.

    Args:
        share: What is outside of attention stays `model`'s memory, for a result that is not
            trained.
    """
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
