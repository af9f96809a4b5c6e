"""Attention with capped scores or sinks in the softmax, which fused attention does not support.

Legend: B batch, H query heads, T query tokens, S tokens attended to, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Softcap tanh(scores / softcap)."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def softmax_beside(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Return the softmax over the last dim with one more logit that is dropped afterwards.

    It takes its share, so that the weights sum to less than 1.

    Args:
        scores: `[..., S]`; the softmax is in float32 at least.
        sink: `[...]`, broadcast.
    """
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sink is None:
        return scores.softmax(-1, dtype=wide).to(scores.dtype)
    both = torch.cat([scores, sink.to(scores).expand(scores.shape[:-1])[..., None]], dim=-1)
    both = both - both.max(dim=-1, keepdim=True).values
    return both.softmax(-1, dtype=wide)[..., :-1].to(scores.dtype)


def hidden(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores `[B, H, T, S]` under a mask as transformers hands it on.

    Boolean (True: seen), additive, or None: causal. One query token then sees all S, and several
    are the first of them: the others are the places of a static cache that are still empty.
    """
    if mask is None:
        T, S = scores.shape[-2:]
        first = S - T if T == 1 else 0
        mask = torch.ones(T, S, dtype=torch.bool, device=scores.device).tril(first)
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention with all scores in memory, `[B, H, T, d]`.

    The order of operations is that of the stock models, so that the result is theirs bit for bit.
    Queries, keys and values have as many heads; sinks are `[H]`.
    """
    factor = float(query.shape[-1]) ** -0.5 if scaling is None else scaling
    scores = hidden(capped(query @ key.transpose(2, 3) * factor, softcap), mask)
    weights = softmax_beside(scores, None if sinks is None else sinks[:, None])
    return F.dropout(weights, dropout, training=dropout > 0) @ value
