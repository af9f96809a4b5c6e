"""A cache layer with the key-side weights of composition in addition to keys and values.

Xiao 2024, sec. 4.4. Legend: B batch, S cached tokens, C values per token
(`Composition.cached_values`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from attention.modeling.growing_cache import GrowingLayer, cache_layer


class ComposedLayer(GrowingLayer):
    """A growing cache layer with `key_weights [B, S, C]`.

    Every operation on the keys does the same to them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.key_weights: Tensor | None = None

    def update_weights(self, new: Tensor) -> Tensor:
        """Append the weights of new tokens `[B, T, C]`; returns those of all tokens."""
        previous = self.key_weights
        self.key_weights = new if previous is None else torch.cat([previous, new], dim=1)
        return self.key_weights

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.key_weights is not None:
            self.key_weights = change(self.key_weights)

    def offload(self) -> None:
        super().offload()
        self._change(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        super().prefetch()
        self._change(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reset(self) -> None:
        super().reset()
        self.key_weights = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._change(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if tokens_to_remove:
            self._change(lambda tensor: tensor[:, : -abs(tokens_to_remove)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._change(lambda tensor: tensor[indices])


def composed_layer(cache: Cache, index: int) -> ComposedLayer:
    """Return the layer of a cache, swapped for a `ComposedLayer` if it is a fresh dynamic one.

    Raises:
        ValueError: For any other kind (static, sliding, quantised), and for one that another model
            has filled.
    """
    layer = cache_layer(cache, index, ComposedLayer)
    if not isinstance(layer, ComposedLayer):
        filled = " that already holds tokens" if type(layer) in (DynamicLayer, GrowingLayer) else ""
        raise ValueError(
            f"composition (dcmha) needs a dynamic cache for its key-side weights, got "
            f"{type(layer).__name__}{filled} "
            f"in layer {index}; leave cache_implementation unset, start from an empty "
            f"DynamicCache(), and use "
            "composition's own window in place of sliding_window"
        )
    return layer
