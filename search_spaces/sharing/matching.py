"""Which head of an earlier layer each head could use the weights of (Cao 2024, Eq. 3 and Alg. 1).

Legend: L layers, H heads (or MLP blocks) a layer, d head dim, D model dim, N shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from attention.heads import LayerHeads
from attention.modeling.mlp import MlpWeights, blocks_of
from attention.plan import HeadShare, resolve_shares

# Cosines that agree in so many decimals are ties, broken by lowest (layer, head): rounding must not
# decide.
DECIMALS = 9
CHUNK = 1 << 24  # numbers of the normalised Gram product in memory at once


def similarities(layers: Sequence[Sequence[Tensor]]) -> np.ndarray:
    """Cosines of all heads of all layers, `[L·H, L·H]` float64 (Eq. 3); 0 for a head of zeros.

    `layers[l]`: the weights that are compared, `[H, rows, D]` each; a head's are flattened and
    concatenated. The product is summed over slices of rows, so that memory stays bounded for any
    model.
    """
    count = sum(parts[0].shape[0] for parts in layers)
    gram = torch.zeros(count, count, dtype=torch.float64)
    for part in zip(*layers, strict=True):
        rows, width = part[0].shape[1:]
        step = max(1, CHUNK // (count * width))
        for start in range(0, rows, step):
            x = (
                torch.cat([w[:, start : start + step].detach().flatten(1) for w in part])
                .double()
                .cpu()
            )
            gram.addmm_(x, x.T)
    norms = gram.diagonal().sqrt()
    norms = torch.where(norms > 0, norms, torch.inf)
    return (gram / norms[:, None] / norms).numpy()


def best_matches(cosines: np.ndarray, num_heads: int) -> list[HeadShare]:
    """Return for every head but those of the first layer its best match in an earlier layer.

    The best pairs come first.
    """
    rounded = np.round(cosines, DECIMALS)
    matches: list[tuple[float, HeadShare]] = []
    for index in range(num_heads, len(rounded)):
        layer, head = divmod(index, num_heads)
        earlier = rounded[index, : layer * num_heads]
        best = int(earlier.argmax())  # the first of equals
        matches.append((-float(earlier[best]), HeadShare(layer, head, *divmod(best, num_heads))))
    return [share for _, share in sorted(matches)]


def share_count(alpha: float | Fraction, num_layers: int, num_heads: int) -> int:
    """N = α·L·H, rounded down: never more than α is shared (**silent** in the paper).

    α is taken as the decimal that it is written as: 0.29 of 100 heads are 29, not the 28 of binary
    fractions.

    Raises:
        ValueError: Outside [0, (L - 1)/L]: the first layer has nothing to share from.
    """
    exact = Fraction(str(alpha))
    if not 0 <= exact <= Fraction(num_layers - 1, num_layers):
        raise ValueError(
            f"alpha must lie in [0, {(num_layers - 1) / num_layers:g}] for {num_layers} layers "
            f"(the heads of the first "
            f"have no earlier ones to share), got {float(exact):g}"
        )
    return int(exact * num_layers * num_heads)


def match_parts(
    layers: Sequence[Sequence[Tensor]], alpha: float | Fraction
) -> tuple[HeadShare, ...]:
    """Return the best N shares of heads with these weights, chains resolved to their roots."""
    heads = layers[0][0].shape[0]
    count = share_count(alpha, len(layers), heads)
    if not count:
        return ()
    return resolve_shares(best_matches(similarities(layers), heads)[:count])


def match_heads(
    heads: Sequence[LayerHeads], alpha: float | Fraction, sides: str = "qk"
) -> tuple[HeadShare, ...]:
    """Return the α·L·H heads that most resemble an earlier head, and those (Cao 2024, Alg. 1).

    They are compared by query and key weights. Q, K and V all follow the one match; biases play no
    part in it (**silent**).

    Args:
        heads: Multi-head layers, one entry per layer (lift others).
        alpha: Share of the heads.
        sides: Whose weights are compared, of "q", "k", "v"; those of Eq. 3 by default.

    Raises:
        ValueError: For grouped heads and for an impossible `alpha`.
    """
    for index, layer in enumerate(heads):
        if not layer.q.shape[0] == layer.k.shape[0] == layer.v.shape[0]:
            raise ValueError(
                f"layer {index}: sharing compares query heads with a key and a value head each, "
                f"got "
                f"{layer.k.shape[0]} key and {layer.v.shape[0]} value heads for {layer.q.shape[0]} "
                f"query heads"
            )
    return match_parts([[getattr(layer, side) for side in sides] for layer in heads], alpha)


def match_blocks(
    mlps: Sequence[MlpWeights], num_blocks: int, alpha: float | Fraction
) -> tuple[HeadShare, ...]:
    """Return the same for MLPs cut into `num_blocks` blocks of neurons.

    **silent** in the paper, which only names "FFN".

    Blocks are compared by their input side, [gate ‖ up], as heads are by [Q ‖ K]; the output side
    follows, as V does.
    """
    return match_parts([blocks_of(mlp, num_blocks) for mlp in mlps], alpha)
