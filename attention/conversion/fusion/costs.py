"""The cost of fusing any group of heads of a layer by least squares, without building the heads.

Legend: H heads, g members, d head dim, f free dims. Costs are additive over the groups of a
partition, zero for a group of one, and of one unit within a layer and side, as exact grouping
needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from attention.calibration.moments import LayerStatistics, augmented
from attention.conversion.fusion.rank import (
    RealFit,
    complex_error,
    complex_gram,
    diagonal_blocks,
    fit_real,
    pair_energy,
    symmetric_root,
)
from attention.conversion.fusion.signs import signs, unit_gram
from attention.geometry import HeadGeometry
from attention.heads import VALUE_SIDE, LayerHeads, distinct_heads

# Relative size of an eigenvalue of sums in float32 below which a direction counts as absent.
SINGLE_PRECISION = 1e-6
# Multiply-adds of all eigenvalues and eigenvectors of a symmetric matrix, over the cube of its
# size.
EIGEN = 9


class Cost:
    """Cost of a group. Nothing is remembered: that is for the caller, who knows what comes again.

    Args:
        num_heads: H.
        width: How many times as wide as its members the shared head of a group is.

    Attributes:
        preparation: Approximate multiply-adds before the first price, if they are not negligible
            compared with those of prices.
    """

    preparation: float = 0.0

    def __init__(self, num_heads: int, width: int = 1) -> None:
        self.num_heads = num_heads
        self.width = width

    def cost(self, members: Sequence[int]) -> float:
        """Cost of fusing these heads into one.

        Raises:
            ValueError: If a head is named twice or does not exist.
        """
        key = self._checked(members)
        if len(key) == 1:
            return 0.0
        return self._batch(torch.tensor([key]))[0].item()

    def costs(self, groups: Sequence[Sequence[int]], chunk: int = 256) -> Tensor:
        """Costs of several groups of one size, `[n]` float64.

        Together they take less time than one by one.

        Raises:
            ValueError: As `cost` does, and for groups of several sizes.
        """
        if len({len(group) for group in groups}) > 1:
            raise ValueError(
                f"groups must be of one size, got sizes {sorted({len(group) for group in groups})}"
            )
        index = torch.tensor([self._checked(group) for group in groups])
        if not len(groups) or index.shape[1] == 1:
            return torch.zeros(len(groups), dtype=torch.float64)
        return torch.cat([self._batch(part).cpu() for part in index.split(chunk)])

    def _checked(self, members: Sequence[int]) -> tuple[int, ...]:
        key = tuple(sorted(members))
        if not key or len(set(key)) != len(key) or not 0 <= key[0] <= key[-1] < self.num_heads:
            raise ValueError(
                f"members must be distinct heads of 0..{self.num_heads - 1}, got {tuple(members)}"
            )
        return key

    def effort(self, members: int) -> float:
        """Multiply-adds of the cost of one group, nearly: those of its eigenvalue problems."""
        raise NotImplementedError

    def _batch(self, groups: Tensor) -> Tensor:
        """Costs of groups of equal size, `[n, g]` -> `[n]`."""
        raise NotImplementedError


class KeyCost(Cost):
    """Mean squared change of the members' attention logits (before scaling), summed over members.

    Queries and keys are taken as independent and, in a rotary pair, as of random relative phase.
    Rotary pairs: all but the leading eigenvalue of the query-weighted complex Gram. Free dims, and
    all dims without rotary embedding: the tail of the query-weighted real Gram; what is constant
    over keys drops out of the softmax and is left out. With a norm on the queries and keys of each
    head nothing but signs can be folded: the cost of the mean after them, where each head's norm
    over tokens stands for its norm at each token and the norm's weights are left out. A norm over
    all heads at once divides them by one number, so that heads are compared as elsewhere, times the
    norm's weights.
    """

    def __init__(
        self,
        heads: LayerHeads,
        statistics: LayerStatistics,
        geometry: HeadGeometry,
        width: int = 1,
    ) -> None:
        super().__init__(heads.num_heads, width)
        self.layout = geometry.rotary
        self.qk_norm = geometry.qk_norm and not geometry.whole_norm
        heads = under_norm(heads) if geometry.whole_norm else heads
        first, which = distinct_heads(heads.k, heads.k_bias)
        # In float32, as the products that were summed up in the moment.
        rows = augmented(heads.k, heads.k_bias)[first].float()
        if self.qk_norm:
            units = unit_gram(rows, statistics.input_moment, self.layout).double()[:, which][
                :, :, which
            ]
            self.gram = units if geometry.keeps_signs else units.sum(0, keepdim=True)
            self.signed = geometry.keeps_signs
            self.energy = torch.einsum("hdd->h", statistics.query_moment.to(self.gram))
            return
        pairs = complex_gram(rows, statistics.input_moment, self.layout).to(torch.complex128)
        self.pairs = pairs[:, which][:, :, which]
        self.energy = pair_energy(statistics.query_power(heads, torch.float32), self.layout)
        self.free_gram, self.free_moment = free_parts(heads, statistics, geometry)

    def effort(self, members: int) -> float:
        if self.qk_norm:
            return EIGEN * len(self.gram) * members**3
        free = EIGEN * (members * len(self.layout.free)) ** 3
        return free + EIGEN * self.layout.dims / 2 * members**3

    def _batch(self, groups: Tensor) -> Tensor:
        if self.qk_norm:
            return self._of_mean(groups)
        index = groups.to(self.energy.device)
        gram = self.pairs[:, index[:, :, None], index[:, None, :]].transpose(0, 1)
        energy = self.energy[:, index].transpose(0, 1)
        costs = complex_error(gram, energy, self.width) if self.layout.dims else 0.0
        if self.layout.free:
            costs = costs + self._free(index)
        return costs  # type: ignore[return-value]

    def _free(self, index: Tensor) -> Tensor:
        # All members see the same keys, so the tail of the weighted Gram is exact: no vectors are
        # needed.
        count, members = index.shape
        gram = self._weighted_free[index[:, :, None], index[:, None, :]].transpose(2, 3)
        size = members * gram.shape[-1]
        values = torch.linalg.eigvalsh(gram.reshape(count, size, size))
        dropped = max(0, members - self.width) * gram.shape[-1]
        return values[:, :dropped].clamp_min(0).sum(1)

    @cached_property
    def _weighted_free(self) -> Tensor:
        """The Gram of keys as the queries weigh them, free dims only: `[H, H, f, f]`."""
        root = symmetric_root(self.free_moment)
        return torch.einsum("iab,ijbc,jdc->ijad", root, self.free_gram, root)

    def _of_mean(self, groups: Tensor) -> Tensor:
        index = groups.to(self.gram.device)
        gram = self.gram[:, index[:, :, None], index[:, None, :]]
        if self.signed:
            own_sign = signs(gram)
            gram = gram * own_sign[..., :, None] * own_sign[..., None, :]
        gram = gram.sum(0)
        tiny = torch.finfo(gram.dtype).tiny
        power = gram.diagonal(dim1=1, dim2=2).clamp_min(tiny)
        cosine = gram.mean(2) / (power * gram.mean((1, 2)).clamp_min(tiny)[:, None]).sqrt()
        return (self.energy[index] * (2 - 2 * cosine)).sum(1)


def value_sizes(heads: LayerHeads, statistics: LayerStatistics) -> Tensor:
    """Return the root mean square of the values of each value head, `[G]` float64."""
    power = torch.einsum("iidd->i", statistics.value_gram(heads)) / heads.v.shape[1]
    return power.clamp_min(torch.finfo(power.dtype).tiny).sqrt()


def with_unit_values(heads: LayerHeads, statistics: LayerStatistics) -> LayerHeads:
    """Return heads whose values have a root mean square of 1, for values that pass a norm.

    Each head's mean over tokens stands for its norm at each token. Where values do pass a norm
    this changes no logit.
    """
    sizes = value_sizes(heads, statistics)
    return heads.changed(
        VALUE_SIDE, lambda rows: (rows / sizes.view(-1, *[1] * (rows.dim() - 1))).to(rows.dtype)
    )


class ValueCost(Cost):
    """Mean squared change of the attention output, summed over the members and output dims.

    Each head counts under the covariance of what its own attention weights let through. Exact for
    what `least_squares_fuse` builds without sweeps, a bound from above with them. Errors of
    different heads are taken as uncorrelated. With an output bias the means cost nothing, since the
    bias takes up what is constant.
    """

    def __init__(
        self,
        heads: LayerHeads,
        statistics: LayerStatistics,
        geometry: HeadGeometry | None = None,
        width: int = 1,
    ) -> None:
        super().__init__(heads.num_heads, width)
        self.heads = heads
        self.statistics = statistics
        self.metrics = head_metrics(heads)
        self.first, self.which = distinct_heads(heads.v, heads.v_bias)
        self._roots: dict[tuple[int, ...], Tensor] = {}
        count, dim, width = heads.v.shape
        rows = float(len(self.first) * dim)
        self.preparation = count * rows * width * (width / 2 + rows)

    def effort(self, members: int) -> float:
        return (EIGEN + 1) * (
            members * len(self.first) / self.num_heads * self.metrics.shape[-1]
        ) ** 3

    def _batch(self, groups: Tensor) -> Tensor:
        return torch.stack([self._error(group) for group in groups])

    def _error(self, group: Tensor) -> Tensor:
        """Return the errors of `fit` without sweeps, without building it.

        They are in coordinates in which every metric is 1.
        """
        units, which = self._units(group)
        own_gnn = self._of(units, group)
        root_udd = self._root(group, which)
        dim = root_udd.shape[-1]
        metrics = self.metrics[group.to(self.metrics.device)]

        def weighted(matrix: Tensor) -> Tensor:
            return (root_udd @ matrix.reshape(len(units), dim, -1)).flatten(0, 1)

        pooled = weighted(weighted(own_gnn.mean(0)).T)
        rank = min(self.width, len(units)) * dim
        basis_nr = weighted(torch.linalg.eigh(pooled)[1][:, -rank:])
        seen_gnr = own_gnn @ basis_nr
        each = torch.arange(len(group), device=seen_gnr.device)
        cross_gdr = seen_gnr.view(len(group), -1, dim, rank)[each, which].double()
        shared_grr = (basis_nr.T @ seen_gnr).double()
        values, vectors = torch.linalg.eigh((shared_grr + shared_grr.transpose(1, 2)) / 2)
        alive = values > SINGLE_PRECISION * values[..., -1:].clamp_min(
            torch.finfo(values.dtype).tiny
        )
        read = cross_gdr @ vectors
        read = (read * (metrics @ read)).sum(1) * alive / torch.where(alive, values, 1.0)
        energy = (metrics * diagonal_blocks(own_gnn, which, dim)).sum((1, 2))
        return (energy - read.sum(1)).clamp_min(0).sum()

    def _units(self, group: Tensor) -> tuple[list[int], Tensor]:
        """Return the different value heads of a group, as numbers in `first`, and each member's."""
        units, which = self.which[group].unique(return_inverse=True)
        return units.tolist(), which.to(self.metrics.device)

    def _root(self, group: Tensor, which: Tensor) -> Tensor:
        """Return the root of the members' metrics, summed over those that have the same value head.

        `[u, d, d]` float32.
        """
        members = [
            tuple(group[which.cpu() == unit].tolist()) for unit in range(int(which.max()) + 1)
        ]
        for those in members:
            if those not in self._roots:
                self._roots[those] = symmetric_root(self.metrics[list(those)].sum(0)).float()
        return torch.stack([self._roots[those] for those in members])

    def _of(self, units: list[int], group: Tensor) -> Tensor:
        """Return the Grams of some of the different value heads, weighted by what each member sees.

        `[g, n, n]` float32.
        """
        # No copy of what may be the largest tensor of a conversion.
        if len(units) == len(self.first):
            return self._grams if len(group) == self.num_heads else self._grams[group]
        dim = self.metrics.shape[-1]
        index = torch.tensor(units, device=self._grams.device)
        blocks = self._grams.view(self.num_heads, len(self.first), dim, -1)
        rows = torch.stack([blocks[head].index_select(0, index) for head in group.tolist()])
        size = len(units) * dim
        return (
            rows.view(len(group), size, len(self.first), dim)
            .index_select(2, index)
            .view(len(group), size, size)
        )

    @cached_property
    def _grams(self) -> Tensor:
        """Return the Gram of all different value heads, weighted by what each query head sees.

        `[H, U d, U d]` float32.
        """
        return mixed_gram(
            self.heads, self.statistics, self.first, range(self.num_heads), torch.float32
        )

    def different(self, group: Tensor) -> list[int]:
        """Return the different value heads among the members, ascending.

        Each is named by the first head that has it.
        """
        return [self.first[unit] for unit in self._units(group)[0]]

    def fit(self, group: Tensor, sweeps: int = 0) -> RealFit:
        """Return the fit of one group, `[g]` head indices (see `fit_real`).

        Its basis is of the `different` ones.
        """
        gram = mixed_gram(self.heads, self.statistics, self.different(group), group.tolist())
        return fit_real(
            gram,
            self.metrics[group.to(self.metrics.device)],
            self._units(group)[1],
            sweeps=sweeps,
            width=self.width,
        )


def under_norm(heads: LayerHeads) -> LayerHeads:
    """Fold the weights of the norms that follow into the heads, which then have none."""
    rows = {"q": heads.q_norm, "k": heads.k_norm, "q_bias": heads.q_norm, "k_bias": heads.k_norm}
    for name, weight in rows.items():
        if weight is not None:
            heads = heads.changed(
                [name], lambda x, w=weight: x * (w if x.dim() == 2 else w[..., None])
            )
    return replace(heads, q_norm=None, k_norm=None)


def head_metrics(heads: LayerHeads) -> Tensor:
    """Return the weight of a head's error in the layer's output, `[H, d, d]` float64."""
    o = heads.o.double()
    return o.transpose(1, 2) @ o


def free_parts(
    heads: LayerHeads, statistics: LayerStatistics, geometry: HeadGeometry
) -> tuple[Tensor, Tensor]:
    """Free dims only: Gram of centred keys `[H, H, f, f]` and query moments `[H, f, f]`.

    The mean key adds one number per query to all its logits, which softmax does not see; so it need
    not be fitted.
    """
    free = list(geometry.rotary.free)
    heads = heads.changed(("q", "k", "q_bias", "k_bias"), lambda rows: rows[:, free])
    mean = statistics.key_mean(heads)
    gram = statistics.key_gram(heads) - torch.einsum("ia,jb->ijab", mean, mean)
    return gram, statistics.query_gram(heads)


def mixed_gram(
    heads: LayerHeads,
    statistics: LayerStatistics,
    members: Sequence[int],
    under: Sequence[int],
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return mixed value Grams of `members` under the weights of `under`, `[n, g d, g d]`.

    They are those of `LayerStatistics.mixed_value_gram`, centred if the layer has an output bias to
    take up the means. With sinks a head's mean is no constant of its output, so that none is taken
    up.
    """
    grams = statistics.mixed_value_gram(heads, members, under, dtype)
    if heads.o_bias is None or not statistics.sums_to_one:
        return grams
    means = statistics.mixed_value_mean(heads)[list(under)][:, list(members)].to(grams)
    for gram, mean in zip(grams, means.flatten(1), strict=True):
        gram.addr_(mean, mean, alpha=-1)
    return grams
