"""What fusing a group by least squares costs, for any group of heads of a layer, without building the heads.

Legend: H heads, g members, d head dim, f free dims, P rotary pairs. Costs are additive over the groups of a partition,
zero for a group of one, and of one unit within a layer and side, as exact grouping needs. Grams are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from attention.fusion.rank import RealFit, complex_error, complex_gram, fit_real, pair_energy
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.moments import LayerStatistics


class _Cost:
    """Cost of a group, remembered by its members."""

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self._known: dict[tuple[int, ...], float] = {}

    def cost(self, members: Sequence[int]) -> float:
        """Cost of fusing these heads into one. Raises ValueError if a head is named twice or does not exist."""
        key = tuple(sorted(members))
        if not key or len(set(key)) != len(key) or not 0 <= key[0] <= key[-1] < self.num_heads:
            raise ValueError(f"members must be distinct heads of 0..{self.num_heads - 1}, got {tuple(members)}")
        if len(key) == 1:
            return 0.0
        if key not in self._known:
            self._known[key] = self._batch(torch.tensor([key]))[0].item()
        return self._known[key]

    def all_subsets(self, chunk: int = 256) -> Tensor:
        """Costs of every subset of heads, `[2^H]` float64: bit h of the index says whether head h is a member.

        The empty set costs 0. `chunk` groups are worked on at a time. Raises ValueError above 16 heads.
        """
        if self.num_heads > 16:
            raise ValueError(f"all subsets of {self.num_heads} heads are too many; the limit is 16, use cost(members)")
        costs = torch.zeros(2**self.num_heads, dtype=torch.float64)
        for size in range(2, self.num_heads + 1):
            groups = torch.tensor(list(combinations(range(self.num_heads), size)))
            for part in groups.split(chunk):
                costs[(2**part).sum(1)] = self._batch(part).cpu()
        return costs

    def _batch(self, groups: Tensor) -> Tensor:
        """Costs of groups of equal size, `[n, g]` -> `[n]`."""
        raise NotImplementedError


class KeyCost(_Cost):
    """Mean squared change of the members' attention logits (before scaling), summed over the members.

    Queries and keys are taken as independent and, in a rotary pair, as of random relative phase. Rotary pairs: all but
    the leading eigenvalue of the query-weighted complex Gram. Free dims, and all dims without rotary embedding: the
    tail of the query-weighted real Gram; what is constant over keys drops out of the softmax and is left out. With a
    norm on queries and keys nothing can be folded: the cost of the plain mean, where each head's norm over tokens
    stands for its norm at each token and the norm's weights are left out.
    """

    def __init__(self, heads: LayerHeads, statistics: LayerStatistics, geometry: HeadGeometry) -> None:
        super().__init__(heads.num_heads)
        self.layout, self.qk_norm = geometry.rotary, geometry.qk_norm
        gram = statistics.key_gram(heads)
        if self.qk_norm:
            self.gram = torch.einsum("ijdd->ij", gram)
            self.energy = torch.einsum("hdd->h", statistics.query_moment.to(gram))
            return
        moment = statistics.query_gram(heads)
        self.pairs, self.energy = complex_gram(gram, self.layout), pair_energy(moment, self.layout)
        self.free_gram, self.free_moment = free_parts(heads, statistics, geometry)

    def _batch(self, groups: Tensor) -> Tensor:
        if self.qk_norm:
            return self._of_mean(groups)
        index = groups.to(self.energy.device)
        gram = self.pairs[:, index[:, :, None], index[:, None, :]].transpose(0, 1)
        costs = complex_error(gram, self.energy[:, index].transpose(0, 1)) if self.layout.dims else 0.0
        if self.layout.free:
            costs = costs + torch.stack([self._free(group) for group in index])
        return costs  # type: ignore[return-value]

    def _free(self, group: Tensor) -> Tensor:
        gram = self.free_gram[group[:, None], group]
        return fit_real(gram.expand(len(group), *gram.shape), self.free_moment[group]).errors.sum()

    def _of_mean(self, groups: Tensor) -> Tensor:
        index = groups.to(self.gram.device)
        gram = self.gram[index[:, :, None], index[:, None, :]]
        tiny = torch.finfo(gram.dtype).tiny
        own = gram.diagonal(dim1=1, dim2=2).clamp_min(tiny)
        cosine = gram.mean(2) / (own * gram.mean((1, 2)).clamp_min(tiny)[:, None]).sqrt()
        return (self.energy[index] * (2 - 2 * cosine)).sum(1)


class ValueCost(_Cost):
    """Mean squared change of the attention output, head by head, summed over the members and output dims.

    Exact for what `least_squares_fuse` builds with the same `sweeps`: each head under the covariance of what its own
    attention weights let through. Without sweeps it is several times faster and a bound from above. Errors of
    different heads are taken as uncorrelated. With an output bias the means cost nothing, since the bias takes up what
    is constant.
    """

    def __init__(
        self, heads: LayerHeads, statistics: LayerStatistics, geometry: HeadGeometry | None = None, *, sweeps: int = 0
    ) -> None:
        super().__init__(heads.num_heads)
        self.sweeps = sweeps
        self.gram = mixed_gram(heads, statistics)
        self.metrics = output_metrics(heads)

    def _batch(self, groups: Tensor) -> Tensor:
        return torch.stack([self.fit(group).errors.sum() for group in groups])

    def fit(self, group: Tensor) -> RealFit:
        """The fit of one group, `[g]` head indices."""
        index = group.to(self.gram.device)
        own = self.gram[index[:, None, None], index[None, :, None], index]
        return fit_real(own, self.metrics[index], sweeps=self.sweeps)


def free_parts(heads: LayerHeads, statistics: LayerStatistics, geometry: HeadGeometry) -> tuple[Tensor, Tensor]:
    """Free dims only: Gram of centred keys `[H, H, f, f]` and query moments `[H, f, f]`.

    The mean key adds one number a query to all its logits, which softmax does not see; so it need not be fitted.
    """
    free = torch.tensor(geometry.rotary.free, dtype=torch.long)
    mean = statistics.key_mean(heads)
    gram = statistics.key_gram(heads) - torch.einsum("ia,jb->ijab", mean, mean)
    moment = statistics.query_gram(heads)
    return gram[..., free[:, None], free], moment[..., free[:, None], free]


def mixed_gram(heads: LayerHeads, statistics: LayerStatistics) -> Tensor:
    """`[H, H, H, d, d]`: the mixed value Grams, centred if the layer has an output bias to take up the means."""
    gram = statistics.mixed_value_gram(heads)
    if heads.o_bias is None:
        return gram
    mean = statistics.mixed_value_mean(heads)
    return gram - torch.einsum("hia,hjb->hijab", mean, mean)


def output_metrics(heads: LayerHeads) -> Tensor:
    """O_h^T O_h `[H, d, d]` float64: how an error of head h counts in the layer's output."""
    o = heads.o.double()
    return o.transpose(1, 2) @ o
