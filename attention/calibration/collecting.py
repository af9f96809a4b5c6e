"""What the calibration pass reads from a running model, and how it gets in and out of it.

Legend: B sequences a batch, T tokens, S tokens attended to, H query heads, d head dim, D model dim, e = D + 1 (the
constant of the biases appended).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from attention.calibration.moments import LayerStatistics
from attention.families import families, family_of
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.modeling.running import entering

NAME = "headfold_calibration"

_collectors: dict[nn.Module, Collector] = {}


class Collector:
    """Sums of one layer. `see_call` and `see_attention` are called by the model as it runs."""

    def __init__(self, module: nn.Module, geometry: HeadGeometry, heads: LayerHeads, sampled: int) -> None:
        wide = geometry.hidden_size + 1
        self.num_heads, self.sampled, self.tokens = geometry.num_heads, sampled, 0
        self.heads = heads
        self.norm = getattr(module, families()[geometry.family].query_norm) if geometry.qk_norm else None
        self.input_sum = torch.zeros(wide, wide, dtype=torch.float64)
        self.mixed_sum = torch.zeros(geometry.num_heads, wide, wide)
        self.query_sum = torch.zeros(geometry.num_heads, geometry.head_dim, geometry.head_dim, dtype=torch.float64)
        self.samples: list[Tensor] = []
        self.x_BTe: Tensor | None = None

    def see_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x_BTD = entering(args, kwargs).float()
        if (missing := self.sampled - sum(map(len, self.samples))) > 0:
            self.samples.append(x_BTD[:missing].cpu())
        self.x_BTe = torch.cat([x_BTD, x_BTD.new_ones(*x_BTD.shape[:2], 1)], dim=-1)
        flat = self.x_BTe.flatten(0, 1)
        self.tokens += len(flat)
        self.input_sum += (flat.T @ flat).cpu()
        for head, query in enumerate(self.queries(x_BTD)):
            self.query_sum[head] += (query.T @ query).cpu()

    def queries(self, x_BTD: Tensor) -> Iterator[Tensor]:
        """Queries of each head before RoPE, `[BT, d]` float32."""
        for head in range(self.num_heads):
            query = x_BTD.flatten(0, 1) @ self.heads.q[head].T
            if self.heads.q_bias is not None:
                query = query + self.heads.q_bias[head]
            if self.norm is not None:
                query = self.norm(query.to(self.norm.weight.dtype)).float()
            yield query

    def see_attention(self, weights_BHTS: Tensor) -> None:
        """Moments of the mixed inputs, one head at a time."""
        if self.x_BTe is None:
            raise RuntimeError("attention ran before its input was seen; this model calls its layers in a way unknown")
        for head in range(self.num_heads):
            # The rows of the weights sum to 1, so the appended constant stays 1.
            mixed = (weights_BHTS[:, head] @ self.x_BTe).flatten(0, 1)
            self.mixed_sum[head] += (mixed.T @ mixed).cpu()
        self.x_BTe = None

    def finish(self) -> LayerStatistics:
        empty = torch.zeros(0, 0, self.heads.hidden_size)
        return LayerStatistics(
            tokens=self.tokens,
            input_moment=self.input_sum / self.tokens,
            mixed_moment=self.mixed_sum.div_(self.tokens),
            query_moment=self.query_sum / self.tokens,
            inputs=torch.cat(self.samples) if self.samples else empty,
        )


def calibration_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: plain attention, whose weights the module's collector sees.

    query `[B, H, T, d]`, key and value of as many heads as the checkpoint keeps, additive mask `[B, 1, T, T]`.
    """
    key, value = (_to_query_heads(module, states, name) for states, name in ((key, "key_map"), (value, "value_map")))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1)
    _collectors[module].see_attention(weights)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


def _to_query_heads(module: nn.Module, states: Tensor, name: str) -> Tensor:
    head_map = getattr(module, name, None)  # a Headfold model's own map
    if isinstance(head_map, Tensor):
        return states.index_select(1, head_map)
    return states.repeat_interleave(int(getattr(module, "num_key_value_groups", 1)), dim=1)


AttentionInterface.register(NAME, calibration_attention)
# Eager's mask is additive and always there, so causality and sliding windows arrive whatever the family.
AttentionMaskInterface.register(NAME, eager_mask)


# ---- the model for the time of the pass -------------------------------------------------------------------------


@contextmanager
def collecting(model: PreTrainedModel, geometry: HeadGeometry, sampled: int) -> Iterator[list[Collector]]:
    """Hooks and our attention function in place; both gone afterwards, also after an error."""
    family = family_of(model.config)
    modules = list(family.attention_modules(model))
    before = str(model.config._attn_implementation)
    handles, collectors = [], []
    try:
        for module in modules:
            heads = family.read(module, geometry).to(torch.float32)
            collectors.append(Collector(module, geometry, heads, sampled))
            _collectors[module] = collectors[-1]
            handles.append(module.register_forward_pre_hook(collectors[-1].see_call, with_kwargs=True))
        model.set_attn_implementation(NAME)
        yield collectors
    finally:
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()
        for module in modules:
            _collectors.pop(module, None)
