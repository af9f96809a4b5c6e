"""A dynamic cache layer that keeps room for tokens to come, so that a step need not copy the cache.

Legend: B batch, G^K / G^V kept key / value heads, T new tokens, S cached tokens, d head dim.

The stock dynamic layer copies all that is cached for every new token. This one copies once every
`ROOM` tokens and writes in place between.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

CACHE_NAMES = ("cache", "past_key_values", "layer_past")
"""Names of the cache among an attention module's keywords in transformers: since 5.24, before, and
in GPT-NeoX."""
# Free positions after a copy. With S cached tokens each step copies S / ROOM of them on average.
ROOM = 64


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` whose keys and values are views of longer tensors.

    They are `[B, G^K, S, d]` and `[B, G^V, S, d]`. The prefilled part is stored without spare room,
    which is added with the next token. Where gradients are recorded it concatenates as the stock
    layer does.
    """

    _room: tuple[Tensor, Tensor] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        # Code that crops, reorders or moves the cache replaces the views by other tensors, which
        # have no spare room.
        if name in ("keys", "values"):
            super().__setattr__("_room", None)
        super().__setattr__(name, value)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append `[B, G^K, T, d]` and `[B, G^V, T, d]`; returns those of all tokens."""
        length = self.get_seq_length()
        if length == 0 or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        total = length + key_states.shape[2]
        keys = cast(Tensor, self.keys)
        values = cast(Tensor, self.values)
        room = self._room
        # What was made in inference mode may not be written to outside of it
        lent = room is not None and room[0].is_inference() and not torch.is_inference_mode_enabled()
        if room is None or lent or room[0].shape[2] < total:
            room = _longer(keys, total + ROOM), _longer(values, total + ROOM)
        for tensor, new in zip(room, (key_states, value_states), strict=True):
            tensor.narrow(2, length, total - length).copy_(new)
        self.keys, self.values = (tensor.narrow(2, 0, total) for tensor in room)
        self._room = room
        return self.keys, self.values


def _longer(tensor: Tensor, tokens: int) -> Tensor:
    """Return a copy of `[B, G, S, d]` with room for `tokens` tokens."""
    batch, heads, length, width = tensor.shape
    result = tensor.new_empty((batch, heads, tokens, width))
    result[:, :, :length] = tensor
    return result


def cache_keyword(module: nn.Module) -> str | None:
    """Return the keyword by which an attention module takes a cache, or None.

    A module of a converted model that takes it among its keywords (`take_cache`) has the name that
    the class which it refines has.
    """
    for kind in type(module).__mro__:
        if "forward" in vars(kind):
            parameters = inspect.signature(kind.forward).parameters
            for name in CACHE_NAMES:
                if name in parameters:
                    return name
    return None


def cache_in(kwargs: Mapping[str, Any]) -> Any:
    """Return the cache among the keywords of an attention module, under any of its names.

    None without one.
    """
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def take_cache(kwargs: dict[str, Any]) -> Any:
    """Return the same, taken out of the keywords."""
    cache = cache_in(kwargs)
    for name in CACHE_NAMES:
        kwargs.pop(name, None)
    return cache


def cache_of(output: Any) -> Any:
    """Return the cache in the output of a model."""
    name = next(name for name in CACHE_NAMES if name in output)
    return output[name]


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Return the keyword argument by which the forward pass of `model` takes a cache."""
    parameters = inspect.signature(model.forward).parameters
    return {next(name for name in CACHE_NAMES if name in parameters): cache}


def next_output(model: Any, tokens: Tensor, output: Any) -> Any:
    """Run a model on the `tokens` `[B, T]` that follow those of `output`, in the same cache."""
    return model(tokens, **cache_argument(model, cache_of(output)), use_cache=True)


def cache_layer(cache: Cache, index: int, kind: type[GrowingLayer]) -> Any:
    """Return the layer of a cache, swapped for one of `kind` if it is a fresh dynamic one.

    None if there is no such layer.
    """
    while cache.layer_class_to_replicate is DynamicLayer and len(cache.layers) <= index:
        cache.layers.append(kind())
    layer: Any = cache.layers[index] if index < len(cache.layers) else None
    if (
        type(layer) in (DynamicLayer, GrowingLayer)
        and not isinstance(layer, kind)
        and not layer.is_initialized
    ):
        layer = cache.layers[index] = kind()
    return layer


def grow_cache(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make the layer of a fresh dynamic cache grow in place.

    The arguments are those of a forward pre-hook of an attention module.
    """
    cache = cache_in(kwargs)
    if isinstance(cache, Cache):
        cache_layer(cache, module.layer_idx, GrowingLayer)
