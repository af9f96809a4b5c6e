"""Two estimates of the cost of fusing a group of value heads, where `ValueCost` takes minutes.

Legend: H heads, g members, d head dim, e = model dim + 1, n = g d, K leading combinations. Outputs
of a head are meant in coordinates in which its metric is 1, turned so that those of most energy
come first.

Both rest on the pooled moment, the mean over all heads of what their values see: one Gram matrix a
layer, not H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.calibration.moments import LayerStatistics, augmented, gram_under
from attention.conversion.fusion.costs import SINGLE_PRECISION, Cost, head_metrics
from attention.conversion.fusion.rank import symmetric_root
from attention.heads import LayerHeads

_STEPS = (
    2  # of subspace iteration: with one more no groups were ranked better against their exact costs
)
LEADING = 768  # combinations of outputs that are followed head by head
LEADING_STEPS = 3


class PooledValueCost(Cost):
    """The cost of `ValueCost` as if all heads saw the inputs of the mean head.

    It is an upper bound, the closer the more `steps`.

    Under one covariance the cost is what the eigenvalues of the group's Gram hold beyond the d
    largest, whose sum a subspace iteration bounds from below.
    """

    def __init__(
        self,
        heads: LayerHeads,
        statistics: LayerStatistics,
        steps: int = _STEPS,
        width: int = 1,
    ) -> None:
        super().__init__(heads.num_heads, width)
        self.steps = steps
        self.dim = heads.v.shape[1]
        self.centred = heads.o_bias is not None and statistics.sums_to_one
        rows = (symmetric_root(head_metrics(heads)) @ augmented(heads.v, heads.v_bias)).float()
        count, dim, _ = rows.shape
        gram = gram_under(rows.flatten(0, 1), statistics.pooled_moment().to(rows.device))
        if self.centred:
            means = rows.flatten(0, 1) @ statistics.mixed_means().to(rows).T
            gram = gram - means @ means.T / means.shape[1]
        each = torch.arange(count, device=rows.device)
        turns = (
            torch.linalg.eigh(gram.view(count, dim, count, dim)[each, :, each])[1]
            .flip(-1)
            .transpose(1, 2)
        )
        self.rows = (turns @ rows).flatten(0, 1)
        """Rows of the projection, `[H d, e]` float32."""
        half = (turns @ gram.view(count, dim, -1)).view_as(gram).T
        self.gram = (turns @ half.reshape(count, dim, -1)).view_as(gram)
        """Gram of all outputs under the pooled moment, `[H d, H d]` float32."""
        self.energy = (
            self.gram.diagonal().view(self.num_heads, self.dim).sum(1, dtype=torch.float64)
        )

    def effort(self, members: int) -> float:
        return 2.0 * self.steps * (members * self.dim) ** 2 * self.dim * self.width

    def _batch(self, groups: Tensor) -> Tensor:
        return torch.stack([self._error(group.to(self.gram.device)) for group in groups])

    def _error(self, group: Tensor) -> Tensor:
        gram, basis = self.leading(group)
        captured = (basis * (gram @ basis)).sum(dtype=torch.float64)
        return (self.energy[group].sum() - captured).clamp_min(0)

    def leading(self, group: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Gram of the members' outputs, and a basis of its leading directions.

        Returns:
            The Gram `[n, n]`, and nearly its leading directions `[n, m d]`, orthonormal, m the
            width of the shared head.
        """
        size = len(group) * self.dim
        blocks = self.gram.view(self.num_heads, self.dim, self.num_heads, self.dim)
        # Rows, then columns, in long pieces: an index of single numbers takes longer than the
        # products.
        gram = (
            blocks[group]
            .view(size, self.num_heads, self.dim)
            .index_select(1, group)
            .view(size, size)
        )
        rank = min(self.width, len(group)) * self.dim
        return gram, subspace(gram, self.start(len(group), rank), self.steps)

    def dims(self, group: Tensor) -> Tensor:
        """Rows of the members in `gram`, `[n]`."""
        return (group[:, None] * self.dim + torch.arange(self.dim, device=group.device)).flatten()

    def start(self, members: int, count: int) -> Tensor:
        """Return the first `count` of the members' dims, one of each in turn.

        These have most energy.
        """
        order = torch.arange(count, device=self.gram.device)
        return order % members * self.dim + order // members


class LeadingValueCost(Cost):
    """An estimate of `ValueCost` with each head's own moment of the layer's K leading outputs.

    The part that they do not predict has the pooled moment. All heads' outputs are y = A z + rest,
    z the leading combinations; each head's Gram is A cov_h(z) A^T + the pooled Gram of the rest.
    With K = H d it is exact but for rounding, and for a basis of few steps.
    """

    def __init__(
        self, pooled: PooledValueCost, statistics: LayerStatistics, leading: int = LEADING
    ) -> None:
        super().__init__(pooled.num_heads, pooled.width)
        self.pooled = pooled
        gram = pooled.gram
        size = len(pooled.gram)
        basis = subspace(gram, pooled.start(self.num_heads, min(leading, size)), LEADING_STEPS)
        values, vectors = torch.linalg.eigh(basis.T @ (gram @ basis))
        alive = values > SINGLE_PRECISION * values[-1].clamp_min(torch.finfo(values.dtype).tiny)
        basis = basis @ vectors[:, alive]
        values = values[alive]
        self.predict = gram @ basis / values
        """A, `[H d, K]`."""
        rows = basis.T @ pooled.rows
        bases = [self._own_gram(rows, statistics, head) for head in range(self.num_heads)]
        self.changes = torch.stack(bases) - values.diag()
        """cov_h(z) - cov(z), `[H, K, K]`."""
        at = self.predict.view(self.num_heads, pooled.dim, -1)
        self.energy = pooled.energy + (at @ self.changes * at).sum((1, 2), dtype=torch.float64)

    def _own_gram(self, rows: Tensor, statistics: LayerStatistics, head: int) -> Tensor:
        gram = gram_under(rows, statistics.mixed_triangle(head, self.num_heads).to(rows.device))
        if not self.pooled.centred:
            return gram
        mean = rows @ statistics.mixed_means()[statistics.which(head, self.num_heads)].to(rows)
        return gram - torch.outer(mean, mean)

    def effort(self, members: int) -> float:
        return (
            self.pooled.effort(members)
            + float(members) * self.changes.shape[-1] ** 2 * self.pooled.dim * self.width
        )

    def _batch(self, groups: Tensor) -> Tensor:
        return torch.stack([self._error(group.to(self.predict.device)) for group in groups])

    def _error(self, group: Tensor) -> Tensor:
        pooled = self.pooled
        members = len(group)
        dim = self.pooled.dim
        gram, basis = pooled.leading(group)
        predict = self.predict[pooled.dims(group)]
        changes = self.changes[group]
        basis = torch.linalg.qr(gram @ basis + predict @ (changes.mean(0) @ (predict.T @ basis)))[0]
        read = predict.T @ basis
        moved = changes @ read  # [g, K, m d]
        plain = gram @ basis
        rank = basis.shape[1]
        cross = plain.view(members, dim, rank) + predict.view(members, dim, -1) @ moved
        shared = (basis.T @ plain + read.T @ moved).double()
        ridge = (
            SINGLE_PRECISION * shared.diagonal(dim1=1, dim2=2).mean(1)
            + torch.finfo(torch.float32).tiny
        )
        shared = (shared + shared.transpose(1, 2)) / 2 + ridge[:, None, None] * torch.eye(rank).to(
            shared
        )
        factor, failed = torch.linalg.cholesky_ex(shared)
        solved = torch.linalg.solve_triangular(factor, cross.double().transpose(1, 2), upper=False)
        # Rounded moments may not be positive definite: such a head counts as lost
        explained = solved.square().sum((1, 2)).where(failed == 0, 0.0)
        return (self.energy[group] - explained).clamp_min(0).sum()


def subspace(gram: Tensor, start: Tensor, steps: int) -> Tensor:
    """Return nearly the leading directions of a Gram by subspace iteration.

    Args:
        gram: `[n, n]`.
        start: `[k]`, the columns of the Gram to start from.
        steps: Number of iterations.

    Returns:
        `[n, k]`, orthonormal.
    """
    basis = gram[:, start]
    for _ in range(steps - 1):
        basis = torch.linalg.qr(gram @ basis)[0]
    return basis if steps > 1 else torch.linalg.qr(basis)[0]
