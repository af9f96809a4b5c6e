"""Loss of a model in which one attention layer has other heads: the layers below it are run once, not every time.

Legend: T tokens, D model dim. Only what enters the layer that is being tried is kept, for all batches: `T x D` numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

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
from attention.modeling.running import entered_by, layer_of, run_to
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
        self.layers = [layer_of(self.model, module) for module in self.modules]
        self.batches = sequences.split(batch_size)
        self._below = 0  # the layer that `_streams` enter
        self._streams: Sequence[Tensor | None] = [None] * len(self.batches)

    @cached_property
    def base(self) -> float:
        """The loss as it is, in nats a token."""
        return self._loss(0, [None] * len(self.batches))

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
        self._advance(layer)
        try:
            self._write(layer, heads)
            return self._loss(layer, self._streams) - base
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
    def _loss(self, start: int, streams: Sequence[Tensor | None]) -> float:
        """Mean next-token loss, run from `start` on, which `streams` enter."""

        def loss(batch: Tensor, stream: Tensor | None) -> Tensor:
            with self._from(start, stream):
                return mean_cost(self.model, batch.to(self.model.device), language_modelling)

        return mean_loss((loss(b, s), b) for b, s in zip(self.batches, streams, strict=True))

    @torch.no_grad()
    def _advance(self, layer: int) -> None:
        """Bring the kept streams to the entrance of `layer`."""
        if layer < self._below:
            self._below, self._streams = 0, [None] * len(self.batches)
        if layer == self._below:
            return
        states: list[Tensor] = []
        for batch, stream in zip(self.batches, self._streams, strict=True):
            with self._from(self._below, stream):
                states.append(run_to(self.model, self.layers[layer], batch, through=False).stream.clone())
        self._below, self._streams = layer, states

    @contextmanager
    def _from(self, start: int, stream: Tensor | None) -> Iterator[None]:
        """Layers below `start` hand on what they get, and `start` gets `stream`."""
        if start == 0 or stream is None:
            yield
            return

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return entered_by(stream, args, kwargs)

        # The stock forward is shadowed on the instances only, and shown again afterwards.
        hook = self.layers[start].register_forward_pre_hook(enter, with_kwargs=True)
        for skipped in self.layers[:start]:
            skipped.forward = lambda hidden_states, *args, **kwargs: hidden_states
        try:
            yield
        finally:
            hook.remove()
            for skipped in self.layers[:start]:
                del skipped.forward
