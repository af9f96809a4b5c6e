"""Loss of a model in which one attention layer has other heads: the layers below it are run once, not every time.

Legend: T tokens, D model dim. Only what enters the layer that is being tried is kept, for all batches: `T x D` numbers.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.conversion.conversion import LiftedHeads, convert
from attention.families import family_of, geometry_of
from attention.heads import LayerHeads
from attention.modeling.grouped import attach
from attention.modeling.losses import language_modelling, mean_loss
from attention.modeling.modeling import plan_of
from attention.modeling.predictions import mean_cost
from attention.modeling.running import Streams
from attention.plan import LayerPlan


class LayerTrials:
    """Losses of a model with the heads of one layer exchanged, on `sequences` `[N, T]`.

    Works on a copy of the model's attention with one key and value head a query head (which changes no logit). Layers
    are best tried in ascending order: going back to a lower one starts again from the embeddings.
    """

    def __init__(self, model: PreTrainedModel, sequences: Tensor, *, batch_size: int = 8) -> None:
        own = plan_of(model).unshared
        identity = LayerPlan.identity(own.num_heads)
        lifted = convert(model, replace(own, layers=(identity,) * own.num_layers), share=True)
        self.model = lifted.eval().requires_grad_(False)
        self.family = family_of(self.model.config)
        self.geometry = geometry_of(self.model.config)
        self.heads = LiftedHeads(model)  # of the model given: those of the copy may be views of what is written to
        self.modules = list(self.family.attention_modules(self.model))
        self.streams = Streams(self.model, self.modules, sequences, batch_size)

    @cached_property
    def base(self) -> float:
        """The loss as it is, in nats a token."""
        return self._loss()

    def increase(self, layer: int, heads: LayerHeads) -> float:
        """How much the loss in nats a token increases with these lifted `heads` in `layer`; the model is as before
        afterwards. Raises ValueError if the heads are not lifted."""
        own = self.heads[layer]
        if heads.k.shape != own.k.shape or heads.v.shape != own.v.shape:
            raise ValueError(
                f"layer {layer}: expected {own.k.shape[0]} keys and values, got {heads.k.shape[0]} and "
                f"{heads.v.shape[0]}; expand the heads first"
            )
        base = self.base  # before anything is written
        self.streams.advance(layer)
        try:
            self._write(layer, heads)
            return self._loss() - base
        finally:
            self._write(layer, own)

    def module(self, layer: int, heads: LayerHeads, plan: LayerPlan) -> nn.Module:
        """An attention module of its own, in float32, with `heads` in the shapes of `plan`: to be fitted, say."""
        made = copy.deepcopy(self.modules[layer]).float()
        self.family.reshape(made, self.geometry, plan)
        attach(made, plan)
        self.family.write(made, heads.to(self.model.device))
        return made.eval()

    def heads_of(self, module: nn.Module, plan: LayerPlan) -> LayerHeads:
        """The heads of such a module, one key and one value a query head."""
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
