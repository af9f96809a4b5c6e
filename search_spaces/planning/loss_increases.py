"""Measure the loss increase if one layer has other heads.

Measured, or estimated from the error of its attention.

Legend: T tokens, D model dim. Only the input of the layer that is being tried is stored, for all
batches: `T x D` numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.base.products import tensor_cores
from attention.calibration.store import Calibration, layer_statistics
from attention.conversion.convert import LiftedHeads, convert
from attention.conversion.refinement.local import (
    FIT_DECAY,
    FIT_RATE,
    LayerTask,
    fit_module,
    output_errors,
)
from attention.conversion.refinement.parallel import each_layer, largest
from attention.conversion.refinement.refine import FitWork
from attention.conversion.sensitivity import expected_cost
from attention.families import family_of, geometry_of
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.modeling.grouped import attach
from attention.modeling.losses import language_modelling, mean_loss
from attention.modeling.model_classes import plan_of
from attention.modeling.predictions import mean_cost
from attention.modeling.running import AT_ONCE, Streams
from attention.plan import AttentionPlan, LayerPlan
from search_spaces.recipes.recipe import Recipe

# Ways to know the loss increase of one layer.
ESTIMATED_INCREASE = "estimated"
MEASURED_INCREASE = "measured"

StepReport = Callable[[], None]


class LayerTrials:
    """Losses of a model with the heads of one layer exchanged, on `sequences` `[N, T]`.

    The layers below it are run once, not every time.

    Works on a copy of the model's attention with one key and value head per query head (which
    changes no logit). Layers are best tried in ascending order: going back to a lower one starts
    again from the embeddings.
    """

    def __init__(
        self, model: PreTrainedModel, sequences: Tensor, *, batch_size: int = AT_ONCE
    ) -> None:
        plan = plan_of(model).unshared
        identity = LayerPlan.identity(plan.num_heads)
        lifted = convert(model, replace(plan, layers=(identity,) * plan.num_layers), share=True)
        self.model = lifted.eval().requires_grad_(False)
        self.family = family_of(self.model.config)
        self.geometry = geometry_of(self.model.config)
        # Of the model given: those of the copy may be views of what is written to.
        self.heads = LiftedHeads(model)
        self.modules = list(self.family.attention_modules(self.model))
        self.streams = Streams(self.model, self.modules, sequences, batch_size)

    @cached_property
    def base(self) -> float:
        """The loss as it is, in nats per token."""
        return self._loss()

    def increase(self, layer: int, heads: LayerHeads) -> float:
        """Return the increase of the loss, in nats per token, with these lifted `heads` in `layer`.

        The model is as before afterwards.

        Raises:
            ValueError: If the heads are not lifted.
        """
        layer_heads = self.heads[layer]
        if heads.k.shape != layer_heads.k.shape or heads.v.shape != layer_heads.v.shape:
            raise ValueError(
                f"layer {layer}: expected {layer_heads.k.shape[0]} keys and values, got "
                f"{heads.k.shape[0]} and "
                f"{heads.v.shape[0]}; expand the heads first"
            )
        base = self.base  # before anything is written
        self.streams.advance(layer)
        try:
            self._write(layer, heads)
            return self._loss() - base
        finally:
            self._write(layer, layer_heads)

    def module(self, layer: int, heads: LayerHeads, plan: LayerPlan) -> nn.Module:
        """Return a new attention module, in float32, with `heads` in the shapes of `plan`."""
        module = copy.deepcopy(self.modules[layer]).float()
        self.family.reshape(module, self.geometry, plan)
        attach(module, plan)
        self.family.write(module, heads.to(self.model.device))
        return module.eval()

    def heads_of(self, module: nn.Module, plan: LayerPlan) -> LayerHeads:
        """Return the heads of such a module, one key and one value per query head."""
        return self.family.read(module, self.geometry).expand(plan.key_map, plan.value_map)

    def _write(self, layer: int, heads: LayerHeads) -> None:
        self.family.write(self.modules[layer], heads.to(self.model.device))

    @torch.no_grad()
    def _loss(self) -> float:
        """Mean next-token loss, run from the layer that the streams have reached."""

        def loss(index: int, batch: Tensor) -> Tensor:
            with self.streams.entering(index):
                return mean_cost(self.model, batch.to(self.model.device), language_modelling)

        return mean_loss((loss(i, b), b) for i, b in enumerate(self.streams.batches))


@dataclass(frozen=True)
class LayerIncreases:
    """Loss increases of single layers of the model of `trials`.

    With `fit_steps` the layer is first fitted to the original's output for so many steps, as
    refinement will do: a fit takes away most of what fused keys cost, and little of what values do.
    So nothing is fitted for an estimate where keys stay as they are. Where they are fused the
    estimate is scaled by FIT_DECAY from `fit_steps` to the `refined_steps` of the refinement, if
    these are more.

    `task(layer)`: what the layer is fitted to and judged by; `metric(layer)`: `[D, D]`, see
    `attention.conversion.sensitivity`. The work of each fit is added to `work`.

    Attributes:
        heads: Of each layer, lifted.
        first_layer: The number in its checkpoint of the model's first layer; fits are seeded by the
            numbers there, so that a window of a model gives what the whole model does.
        increases: MEASURED by running the whole model, or ESTIMATED from the error of the
            attention's output (`attention.conversion.sensitivity`).
    """

    recipe: Recipe
    trials: LayerTrials
    geometry: HeadGeometry
    heads: Sequence[LayerHeads]
    calibration: Calibration | None
    task: Callable[[int], LayerTask]
    metric: Callable[[int], Tensor]
    work: list[FitWork]
    first_layer: int = 0
    fit_steps: int = 0
    refined_steps: int = 0
    increases: str = MEASURED_INCREASE

    def of(self, plans: Sequence[tuple[int, AttentionPlan]], report: StepReport) -> list[float]:
        """Return the increases of each (layer, plan); see `PlanningContext.increases_of`."""
        layers = sorted({layer for layer, _ in plans})
        measures = self.increases == MEASURED_INCREASE
        looks = bool(self.fit_steps) or not measures
        tasks = {layer: self.task(layer) for layer in layers if looks}

        def increase(index: int) -> float:
            layer, plan = plans[index]
            find = self._measured if measures else self._estimated
            result = find(layer, plan.layers[layer], tasks.get(layer))
            report()
            return result

        if measures:  # runs the whole model
            return [increase(index) for index in range(len(plans))]
        self.metric(0)  # made before several threads ask for it
        model = self.trials.model
        with tensor_cores(model.device, model.dtype):
            return each_layer(len(plans), increase, largest(self.trials.modules), model.device)

    def _fused(self, layer: int, plan: LayerPlan) -> LayerHeads:
        heads = self.heads[layer]
        statistics = layer_statistics(self.calibration, layer, heads)
        for axis in ("alignment", "fusion"):
            heads = self.recipe.apply(axis, heads, plan, statistics, self.geometry.layer(layer))
        return heads

    def _module(self, layer: int, plan: LayerPlan, task: LayerTask | None) -> nn.Module:
        """Return the layer's attention as `plan` has it, fitted to `task` if that is given."""
        module = self.trials.module(layer, self._fused(layer, plan), plan)
        if task is not None:
            generator = torch.Generator().manual_seed(self.first_layer + layer)
            shared_by = self.geometry.num_kv_heads / plan.key_slices
            self.work.append(
                fit_module(
                    module,
                    task.shortened,
                    self.fit_steps,
                    FIT_RATE,
                    generator,
                    shared_by=shared_by,
                    wide=plan.is_wide,
                )[-1]
            )
        return module

    def _estimated(self, layer: int, plan: LayerPlan, task: LayerTask | None) -> float:
        assert task is not None  # an estimate looks at the layer's output
        fit = bool(self.fit_steps) and plan.key_slices < self.geometry.num_kv_heads
        module = self._module(layer, plan, task if fit else None)
        still_falls = (
            (self.fit_steps / max(self.fit_steps, self.refined_steps)) ** FIT_DECAY if fit else 1.0
        )
        return still_falls * expected_cost(self.metric(layer), output_errors(module, task.check))

    def _measured(self, layer: int, plan: LayerPlan, task: LayerTask | None) -> float:
        if plan.is_wide:  # the model of the trials has heads of the checkpoint's width
            raise ValueError(
                "loss increases of wide heads are estimated; set allocation.increases to estimated"
            )
        if task is not None:
            return self.trials.increase(
                layer, self.trials.heads_of(self._module(layer, plan, task), plan)
            )
        return self.trials.increase(
            layer, self._fused(layer, plan).expand(plan.key_map, plan.value_map)
        )
