"""Statistics of each layer that a calibration collects.

Second moments of activations, and a sample of whole sequences.

Legend: L layers, H query heads, d head dim, D model dim, S sampled sequences of T tokens; x the
input of the attention projections (after the norm); a tilde marks one appended constant, x~ = [x;
1], so that biases are one more column. Every moment is a mean over tokens. Projections are linear,
so the Gram matrix of any heads follows from a moment of x~ without another pass over the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention.heads import LayerHeads

# Of the mean square of a head's summed weights: what a sink takes must be more than rounding.
SINK = 1e-3
BAND = 512  # rows of a moment that are unpacked, multiplied or summed at once
STATISTICS = ("input_moment", "mixed_moments", "query_moment", "inputs")


def augmented(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Append the bias to the rows of a projection, in float64.

    `[G, d, D]`, `[G, d]` or None -> `[G, d, D+1]`.
    """
    column = weight.new_zeros(weight.shape[:2]) if bias is None else bias
    return torch.cat([weight, column[..., None]], dim=-1).double()


def _gram(rows_Hde: Tensor, moment_ee: Tensor) -> Tensor:
    heads, dim, _ = rows_Hde.shape
    flat = rows_Hde.flatten(0, 1)
    return (flat @ moment_ee.to(flat) @ flat.T).view(heads, dim, heads, dim).transpose(1, 2)


def packed(square: Tensor) -> Tensor:
    """Return the lower triangles of symmetric matrices, row by row.

    `[M, e, e]` -> `[M, e (e + 1) / 2]`.
    """
    size = square.shape[-1]
    triangles = square.new_empty(len(square), size * (size + 1) // 2)
    for triangle, matrix in zip(triangles, square, strict=True):
        torch.cat([row[: index + 1] for index, row in enumerate(matrix)], out=triangle)
    return triangles


def unpacked(triangle: Tensor) -> Tensor:
    """Invert `packed` for one matrix: `[e (e + 1) / 2]` -> `[e, e]`."""
    size = (math.isqrt(8 * len(triangle) + 1) - 1) // 2
    matrix = triangle.new_zeros(size, size)
    _unpack(triangle, matrix, 0)
    return matrix + matrix.tril(-1).T


def _unpack(triangle: Tensor, rows: Tensor, begin: int) -> None:
    """Write the rows of a packed triangle from row `begin` on into `rows` `[n, e]`.

    They are 0 above the diagonal, before and after. On the CPU this is done row by row, which is
    several times as fast as by a mask; on an accelerator by index, since each row would be a
    separate launch.
    """
    if rows.is_cpu:
        start = begin * (begin + 1) // 2
        for index, row in enumerate(rows, begin + 1):
            row[:index] = triangle[start : start + index]
            start += index
        return
    row = torch.arange(begin, begin + len(rows), device=rows.device)[:, None]
    column = torch.arange(rows.shape[1], device=rows.device)
    place = (row * (row + 1) // 2 + column).clamp_(max=len(triangle) - 1)
    rows.copy_(triangle.take(place).masked_fill_(column > row, 0))


def gram_under(rows: Tensor, triangle: Tensor) -> Tensor:
    """Return R M R^T `[n, n]` of rows `[n, e]` and a `packed` moment, in the precision of the rows.

    M is L + L^T with half of its diagonal in L, so that R L R^T and its transpose make the product;
    L is unpacked one band of rows at a time and the part above its diagonal is not multiplied.
    """
    size = rows.shape[1]
    half = torch.zeros_like(rows)
    lower = rows.new_zeros(min(BAND, size), size)
    for begin in range(0, size, BAND):
        end = min(begin + BAND, size)
        band = lower[: end - begin]
        _unpack(triangle, band, begin)
        band.diagonal(begin).mul_(0.5)
        half[:, :end].addmm_(rows[:, begin:end], band[:, :end])
    product = half @ rows.T
    return product + product.T


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one layer over `tokens` tokens.

    Attributes:
        tokens: Number of tokens.
        input_moment: `[D+1, D+1]` float64, mean of x~ x~^T.
        mixed_moments: `[M, (D+1)(D+2)/2]`, the same, `packed`, of what the values of head h really
            see, [sum_s a_hts x_s; 1] with its attention weights a; one for each head in float32, or
            as `attention.calibration.sizes.MIXED` says, that of head h at h * M // H.
        query_moment: `[H, d, d]` float64, mean of q q^T before RoPE, after bias and query norm.
        inputs: `[S, T, D]` float32, x of the first sequences, in corpus order.

    All tensors are on one device, and so are results; `on` returns them on the device of the heads.
    """

    tokens: int
    input_moment: Tensor
    mixed_moments: Tensor
    query_moment: Tensor
    inputs: Tensor

    @property
    def device(self) -> torch.device:
        return self.input_moment.device

    def on(self, device: torch.device) -> LayerStatistics:
        """Return these statistics on `device`: each tensor is copied when it is first read.

        `mixed_moments` alone, the largest by far, stays where it is: the methods copy what they
        return.
        """
        return self if device == self.device else _Copied(self, device)

    @property
    def sums_to_one(self) -> bool:
        """Whether the attention weights of a token sum to one; with a sink they sum to less."""
        return bool((self.mixed_moments[:, -1] - 1).abs().max() < SINK)

    def which(self, head: int, num_heads: int) -> int:
        """Return the number of the mixed moment of one of H query heads."""
        return head * len(self.mixed_moments) // num_heads

    def mixed_triangle(self, head: int, num_heads: int) -> Tensor:
        """Return the mixed moment of one of H query heads, `packed`, `[(D+1)(D+2)/2]`."""
        return self.mixed_moments[self.which(head, num_heads)].to(self.device)

    def mixed_means(self) -> Tensor:
        """Return the mean of what the heads see, `[M, D+1]`: the last rows of the mixed moments."""
        return self.mixed_moments[:, -len(self.input_moment) :].to(self.device)

    def pooled_moment(self) -> Tensor:
        """Return the mean of the mixed moments, `packed`, float32."""
        total = torch.zeros_like(self.mixed_moments[0], dtype=torch.float32)
        for moment in self.mixed_moments:
            total += moment
        return (total / len(self.mixed_moments)).to(self.device)

    def key_gram(self, heads: LayerHeads) -> Tensor:
        """Return the mean of k_i k_j^T before RoPE and key norm, `[G, G, d, d]` float64.

        Biases are included.
        """
        return _gram(augmented(heads.k, heads.k_bias), self.input_moment)

    def value_gram(self, heads: LayerHeads) -> Tensor:
        """Return the mean of v_i v_j^T, with biases, `[G, G, d, d]` float64."""
        return _gram(augmented(heads.v, heads.v_bias), self.input_moment)

    def query_gram(self, heads: LayerHeads) -> Tensor:
        """Return the mean of q_h q_h^T of *these* heads before RoPE and norm, `[H, d, d]` float64.

        Unlike `query_moment` it follows heads that were rotated since the calibration.
        """
        rows = augmented(heads.q, heads.q_bias)
        return rows @ self.input_moment.to(rows) @ rows.transpose(1, 2)

    def query_power(self, heads: LayerHeads, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the diagonal of `query_gram`, `[H, d]` float64, multiplied in `dtype`."""
        rows = augmented(heads.q, heads.q_bias).to(dtype)
        return (rows @ self.input_moment.to(rows) * rows).sum(-1).double()

    def key_mean(self, heads: LayerHeads) -> Tensor:
        """Return the mean of k before RoPE, with bias, `[G, d]` float64."""
        rows = augmented(heads.k, heads.k_bias)
        return rows @ self.input_moment[:, -1].to(rows)

    def mixed_value_gram(
        self,
        heads: LayerHeads,
        members: Sequence[int],
        under: Sequence[int],
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return the mean of u_hi u_hj^T, u_hi being value head i mixed by the weights of head h.

        u_hh is what head h hands to the output projection; the others are what it would hand on
        with another's values.

        Args:
            heads: The heads of the layer.
            members: The g value heads that i and j run over.
            under: The n query heads that h runs over.
            dtype: Of the result.

        Returns:
            `[n, g d, g d]`.
        """
        bias = None if heads.v_bias is None else heads.v_bias[list(members)]
        rows = augmented(heads.v[list(members)], bias).to(dtype).flatten(0, 1)
        grams = rows.new_empty(len(under), len(rows), len(rows))
        for gram, head in zip(grams, under, strict=True):
            gram.copy_(gram_under(rows, self.mixed_triangle(head, heads.num_heads)))
        return grams

    def mixed_value_mean(self, heads: LayerHeads) -> Tensor:
        """Return the mean of u_hi (see `mixed_value_gram`), `[H, G, d]` float64."""
        rows = augmented(heads.v, heads.v_bias)
        means = self.mixed_means().to(rows)
        means = means[[self.which(head, heads.num_heads) for head in range(heads.num_heads)]]
        return torch.einsum("gde,he->hgd", rows, means)


class _Copied(LayerStatistics):
    """Statistics that are read on another device than their own (`LayerStatistics.on`)."""

    def __init__(self, source: LayerStatistics, device: torch.device) -> None:
        self.__dict__.update(_source=source, _device=device, tokens=source.tokens)

    @property
    def device(self) -> torch.device:
        return self._device

    def on(self, device: torch.device) -> LayerStatistics:
        return self if device == self.device else self._source.on(device)

    def __getattr__(self, name: str) -> Any:
        """Copy a tensor that has not been read before."""
        if name not in STATISTICS:
            raise AttributeError(name)
        tensor = getattr(self._source, name)
        self.__dict__[name] = tensor if name == "mixed_moments" else tensor.to(self.device)
        return self.__dict__[name]


def merged(parts: Sequence[LayerStatistics]) -> LayerStatistics:
    """Merge statistics of one layer over consecutive parts of the corpus."""
    tokens = sum(part.tokens for part in parts)

    def mean(name: str) -> Tensor:
        total = torch.zeros_like(getattr(parts[0], name))
        for part in parts:
            total.add_(getattr(part, name), alpha=part.tokens / tokens)
        return total

    sampled = [part.inputs for part in parts if part.inputs.numel()] or [parts[0].inputs]
    moments = {name: mean(name) for name in STATISTICS if name != "inputs"}
    return LayerStatistics(tokens, **moments, inputs=torch.cat(sampled))
