"""Hooks that read activations from a running model during the calibration pass.

Legend: B sequences per batch, T tokens, S tokens attended to, H query heads, d head dim, D model
dim, e = D + 1 (the constant of the biases appended); b, t: a slice of the sequences and of their
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from attention.calibration.moments import BAND, LayerStatistics, packed
from attention.calibration.sizes import Mixed, matrices, mixed_dtype
from attention.families import families, family_of
from attention.geometry import HeadGeometry
from attention.modeling.running import entering
from attention.modeling.scores import capped, softmax_beside

_NAME = "headfold_calibration"
SLICE_BYTES = 128 * 2**20
"""Bytes of float32 attention weights in memory at a time: those of one head, for some sequences or
some tokens."""

QUERY_TOKENS = 512
"""Tokens whose queries of all heads are in memory at a time."""

ALIGNED = 16
"""Numbers in float32 that 64 bytes hold."""

BLOCK = 256
"""Tokens of a long sequence whose attention weights, over all tokens up to them, are in memory at a
time."""

_collectors: dict[nn.Module, Collector] = {}


class Collector:
    """Sums of one layer, on `device`.

    The running model calls `see_call`, `see_attention` and `end_head`, then `end_call`.
    """

    def __init__(
        self,
        module: nn.Module,
        geometry: HeadGeometry,
        sampled: int,
        mixed: Mixed,
        device: torch.device,
    ) -> None:
        family = families()[geometry.family]
        wide = geometry.hidden_size + 1
        dim = geometry.head_dim
        heads = family.read(module, geometry)
        self.q_HdD = heads.q.float()
        self.q_bias_Hd = None if heads.q_bias is None else heads.q_bias.float()
        self.norm = partial(family.query_norm, module) if geometry.qk_norm else None
        self.dtype = heads.q.dtype
        self.num_heads = geometry.num_heads
        self.sampled = sampled
        self.tokens = 0
        self.mixed: Mixed = mixed
        double: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.input_sum = torch.zeros(wide, wide, **double)
        self.mixed_sum = torch.zeros(matrices(geometry, mixed), wide, wide, device=device)
        self.query_sum = torch.zeros(geometry.num_heads, dim, dim, **double)
        self.samples: list[Tensor] = []
        self.x_BTe: Tensor | None = None
        self.mixed_BTe: Tensor | None = None

    def see_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the input of the attention module before it runs."""
        x_BTD = entering(args, kwargs).float()
        if (missing := self.sampled - sum(map(len, self.samples))) > 0:
            self.samples.append(x_BTD[:missing].cpu())
        wide = x_BTD.shape[2] + 1
        # Products with D + 1 columns are a third faster where rows begin at multiples of 64 bytes.
        aligned = x_BTD.new_ones(*x_BTD.shape[:2], -(-wide // ALIGNED) * ALIGNED)
        aligned[..., : wide - 1] = x_BTD
        self.x_BTe = aligned[..., :wide]
        self.mixed_BTe = torch.empty_like(aligned)[..., :wide]
        flat = self.x_BTe.flatten(0, 1)
        self.tokens += len(flat)
        self.input_sum += (flat.T @ flat).to(self.input_sum.device)
        for q_nHd in self.queries(x_BTD):
            self.query_sum += torch.einsum("nha,nhb->hab", q_nHd, q_nHd).to(self.query_sum.device)

    def queries(self, x_BTD: Tensor) -> Iterator[Tensor]:
        """Yield queries before RoPE of some tokens at a time, `[n, H, d]` float32.

        All heads are together, since a norm may look at all of them.
        """
        for x_nD in x_BTD.flatten(0, 1).split(QUERY_TOKENS):
            q_nHd = torch.einsum("nD,hdD->nhd", x_nD, self.q_HdD)
            if self.q_bias_Hd is not None:
                q_nHd = q_nHd + self.q_bias_Hd
            yield q_nHd if self.norm is None else self.norm(q_nHd.to(self.dtype)).float()

    def see_attention(self, sequences: slice, tokens: slice, weights_btS: Tensor) -> None:
        """Mix the inputs by the attention weights of one head for a slice of the batch.

        Args:
            sequences: Slice of the sequences of the batch.
            tokens: Slice of their tokens.
            weights_btS: Attention weights of these tokens over the first S tokens.
        """
        if self.x_BTe is None or self.mixed_BTe is None:
            raise RuntimeError(
                "attention ran before its input was seen; this model calls its layers in a way "
                "unknown"
            )
        # The appended constant becomes the sum of a row of the weights: 1, or less if a sink takes
        # some.
        mixed = weights_btS @ self.x_BTe[sequences, : weights_btS.shape[2]]
        self.mixed_BTe[sequences, tokens] = mixed

    def end_head(self, head: int) -> None:
        """Add the moments of the mixed inputs of a query head, whose weights were all seen.

        Those of the whole batch at once: sums of few tokens would be limited by the memory.
        """
        assert self.mixed_BTe is not None
        mixed = self.mixed_BTe.flatten(0, 1)
        total = self.mixed_sum[head * len(self.mixed_sum) // self.num_heads]
        for begin in range(0, len(total), BAND):  # only the lower triangle is stored
            end = begin + BAND
            total[begin:end, :end] += (mixed[:, begin:end].T @ mixed[:, :end]).to(total.device)

    def end_call(self) -> None:
        """Release the batch after the attention has seen all heads."""
        self.x_BTe = self.mixed_BTe = None

    def finish(self) -> LayerStatistics:
        """Return the means, on the CPU."""
        # Not twice in memory longer than need be: collectors stay until all have finished
        mixed, self.mixed_sum = self.mixed_sum, torch.empty(0)
        samples, self.samples = self.samples, []
        mixed.div_(self.tokens * (self.num_heads // len(mixed)))
        return LayerStatistics(
            tokens=self.tokens,
            input_moment=(self.input_sum / self.tokens).cpu(),
            mixed_moments=packed(mixed).to(mixed_dtype(self.mixed)).cpu(),
            query_moment=(self.query_sum / self.tokens).cpu(),
            inputs=torch.cat(samples) if samples else torch.zeros(0, 0, self.q_HdD.shape[2]),
        )


def calibration_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute plain attention and show its weights to the module's collector.

    This is an attention function of transformers. The weights of all heads would be the largest
    tensor by far: `SLICE_BYTES` of them exist at a time.

    Args:
        module: The attention module.
        query: `[B, H, T, d]`.
        key: As many heads as the checkpoint stores.
        value: As many heads as the checkpoint stores.
        attention_mask: Additive, `[B, 1, T, S]`.
        dropout: Of layers that are not collected; others ignore it.
        scaling: Factor of the scores.
        softcap: Soft cap of the scores, or None.
        s_aux: Sinks, or None.
        **kwargs: Ignored.
    """
    if module not in _collectors:  # of a layer that the plan does not change
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    key, value = (
        _to_query_heads(module, states, name)
        for states, name in ((key, "key_map"), (value, "value_map"))
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    count, heads, length, _ = query.shape
    output_BTHd = value.new_empty(count, length, heads, value.shape[-1])
    collector = _collectors[module]
    for head in range(heads):
        for b, t in _slices(count, length, key.shape[2]):
            S = t.stop  # attention is causal: what comes later has no weight
            # In float32: in 16 bits scores would be rounded, and may overflow, before the factor
            keys = key[b, head, :S].float().transpose(-1, -2)
            scores = (query[b, head, t].float() @ keys).mul_(scale)
            scores = capped(scores, softcap)
            if attention_mask is not None:
                scores += attention_mask[b, 0, t, :S]
            weights = softmax_beside(scores, None if s_aux is None else s_aux[head])
            collector.see_attention(b, t, weights)
            output_BTHd[b, t, head] = weights.to(value.dtype) @ value[b, head, :S]
        collector.end_head(head)
    collector.end_call()
    return output_BTHd, None


def _slices(count: int, length: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of sequences and query tokens whose attention weights fit in memory.

    A slice is several short sequences, or some tokens of one; later tokens are left out.
    """
    tokens = max(1, SLICE_BYTES // (4 * keys))
    sequences = max(1, tokens // length)
    tokens = min(tokens, length, BLOCK)
    for first in range(0, count, sequences):
        for start in range(0, length, tokens):
            yield slice(first, first + sequences), slice(start, min(start + tokens, length))


def _to_query_heads(module: nn.Module, states: Tensor, name: str) -> Tensor:
    head_map = getattr(module, name, None)  # a Headfold model's own map
    if isinstance(head_map, Tensor):
        return states.index_select(1, head_map)
    return states.repeat_interleave(int(getattr(module, "num_key_value_groups", 1)), dim=1)


AttentionInterface.register(_NAME, calibration_attention)
# Eager's mask is additive and always present, so causality and sliding windows arrive in every
# family.
AttentionMaskInterface.register(_NAME, eager_mask)


# ---- the model for the time of the pass -------------------------------------------------------


@contextmanager
def collecting(
    model: PreTrainedModel, geometry: HeadGeometry, sampled: int, mixed: Mixed
) -> Iterator[list[Collector]]:
    """Install the hooks and our attention function while the body runs.

    Both are removed on errors, too.

    The sums of a single layer stay on its device; those of several would be more than a GPU has.
    """
    modules = list(family_of(model.config).attention_modules(model))
    before = str(model.config._attn_implementation)
    device = model.device if len(modules) == 1 else torch.device("cpu")
    handles = []
    collectors = []
    try:
        for module in modules:
            collectors.append(Collector(module, geometry, sampled, mixed, device))
            _collectors[module] = collectors[-1]
            handles.append(
                module.register_forward_pre_hook(collectors[-1].see_call, with_kwargs=True)
            )
        model.set_attn_implementation(_NAME)
        yield collectors
    finally:
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()
        for module in modules:
            _collectors.pop(module, None)
