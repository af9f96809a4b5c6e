"""The two factorisations behind least-squares fusion.

Real rank m f, and complex rank m for each rotary pair, of a shared head m times as wide as the
members (1: as wide).

Legend: g members of a group, u different heads among them (query heads that share a head have the
same), d head dim, f dims treated by the real form, n = m f, P = r/2 rotary pairs, y_i the
activations of member i. Both find one shared head y' = sum_i N_i^T y_i and, for each member, the
map that reads y_i back from y'. Plain groups of m narrow heads are a special case of one wide head,
so that its error is never larger.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention.geometry import RotaryLayout

# Relative size of an eigenvalue below which a direction counts as absent: moments are sums of
# float32 products.
CUTOFF = 1e-10


@dataclass(frozen=True)
class RealFit:
    """A fused head as a basis N `[u, f, n]`, and each head from it, y_i ~ L_i y'.

    `back` is L `[g, f, n]`, `errors` `[g]` the mean of |R_i (y_i - L_i y')|^2.
    """

    basis: Tensor
    back: Tensor
    errors: Tensor


def fit_real(
    grams: Tensor,
    metrics: Tensor,
    which: Tensor | None = None,
    *,
    sweeps: int = 0,
    width: int = 1,
) -> RealFit:
    """Return the shared head of g members, each under its own covariance and its own metric.

    grams `[g, u f, u f]`: the Gram of the u different heads among the members under the covariance
    that a member sees; which `[g]`: the head of each member (default: u = g, in order). metrics
    `[g, f, f]`: R_h^T R_h, how the error of member h counts. The basis is exact for the mean of the
    covariances; each read-back is exact for its own. With equal covariances that is the optimum
    (Eckart and Young), otherwise each of `sweeps` rounds solves the basis for the read-backs and
    the read-backs for the basis, which only lowers the error. The shared head has `width` times as
    many dims as a member; those beyond the u f that there are, are zero.
    """
    members, dim = metrics.shape[:2]
    heads = grams.shape[1] // dim
    which = torch.arange(members, device=grams.device) if which is None else which.to(grams.device)
    roots = symmetric_root(summed(metrics, which, heads))
    basis = _leading_basis(grams.mean(0), roots, min(width, heads) * dim)
    back, errors = _read_back(grams, metrics, which, basis)
    energy = (metrics * diagonal_blocks(grams, which, dim)).sum()
    for _ in range(sweeps):
        if errors.sum() <= CUTOFF * energy:
            break  # the fit is exact already, or there is nothing to fit
        refitted = _refit_basis(grams, metrics, which, back, basis)
        fitted, missed = _read_back(grams, metrics, which, refitted)
        if not missed.sum() < errors.sum():
            break  # only rounding is left to fit
        basis = refitted
        back = fitted
        errors = missed
    size = _size_factor(grams, which, basis, dim)
    zeros = max(0, width - heads) * dim
    basis = pad(basis * size, (0, zeros)).view(heads, dim, width * dim)
    return RealFit(basis, pad(back / size, (0, zeros)), errors)


def summed(metrics: Tensor, which: Tensor, heads: int) -> Tensor:
    """Return the metrics of the members that have the same head, `[g, f, f]` -> `[u, f, f]`.

    An error of that head counts in all of them.
    """
    return metrics.new_zeros(heads, *metrics.shape[1:]).index_add_(0, which, metrics)


def diagonal_blocks(grams: Tensor, which: Tensor, dim: int) -> Tensor:
    """Return the Gram of each member's own head under its own covariance, `[g, f, f]`."""
    members = len(grams)
    heads = grams.shape[1] // dim
    each = torch.arange(members, device=grams.device)
    return grams.view(members, heads, dim, heads, dim)[each, which, :, which]


def symmetric_root(matrices: Tensor) -> Tensor:
    """Return a symmetric R with R^T R = the given positive semi-definite matrix, `[..., f, f]`."""
    values, vectors = torch.linalg.eigh(matrices)
    return (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.transpose(-1, -2)


def _positive(values: Tensor) -> Tensor:
    """Mask of ascending eigenvalues that stand above rounding."""
    return values > CUTOFF * values[..., -1:].clamp_min(torch.finfo(values.dtype).tiny)


def _safe(values: Tensor, alive: Tensor) -> Tensor:
    return torch.where(alive, values, torch.ones_like(values))


def _leading_basis(gram: Tensor, roots: Tensor, rank: int) -> Tensor:
    """Return N `[u f, n]` of the best fit of this rank n under one covariance.

    gram `[u f, u f]`, roots `[u, f, f]`.
    """
    weight = torch.block_diag(*roots)
    weighted = weight @ gram @ weight.T
    values, vectors = torch.linalg.eigh((weighted + weighted.T) / 2)
    values = values[-rank:]
    vectors = vectors[:, -rank:]
    alive = _positive(values)
    return weight.T @ (vectors * (_safe(values, alive).pow(-0.25) * alive))


def _read_back(
    grams: Tensor, metrics: Tensor, which: Tensor, basis: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the least-squares map from the shared head to each member, `[g, f, n]`, and errors.

    Each is under the member's own covariance: grams `[g, u f, u f]`, basis `[u f, n]`. The map is
    the best in every metric at once, so the metric enters errors alone.
    """
    members, dim = metrics.shape[:2]
    seen = grams @ basis
    # Mean of y_h y'^T.
    each = torch.arange(members, device=seen.device)
    cross = seen.view(members, -1, dim, basis.shape[1])[each, which]
    shared = basis.T @ seen
    values, vectors = torch.linalg.eigh((shared + shared.transpose(1, 2)) / 2)
    alive = _positive(values)
    back = cross @ (vectors * (alive / _safe(values, alive))[:, None, :]) @ vectors.transpose(1, 2)
    missed = diagonal_blocks(grams, which, dim) - back @ cross.transpose(1, 2)
    return back, torch.einsum("hab,hab->h", metrics, missed).clamp_min(0)


def _refit_basis(
    grams: Tensor, metrics: Tensor, which: Tensor, back: Tensor, start: Tensor
) -> Tensor:
    """Return the best N for given L.

    Sum_h C_h N L_h^T P_h L_h = sum_h C_h[:, h] P_h L_h, by conjugate gradients from `start`.

    Preconditioned by the same equation under the mean covariance and the mean of L^T P L, which is
    solved directly; so a few iterations do, and every one of them lowers the error.
    """
    members, dim = metrics.shape[:2]
    weights = back.transpose(1, 2) @ metrics @ back
    each = torch.arange(members, device=grams.device)
    columns = grams.view(members, grams.shape[1], -1, dim)[each, :, which]
    left, right = (_pseudo_inverse(m.mean(0), 1e-7) for m in (grams, weights))

    def apply(n: Tensor) -> Tensor:
        return (grams @ n @ weights).sum(0)

    n = start
    residual = (columns @ metrics @ back).sum(0) - apply(n)
    direction = step = left @ residual @ right
    power = (residual * step).sum()
    for _ in range(5):
        if power <= 0:
            break
        image = apply(direction)
        curvature = (direction * image).sum()
        if curvature <= 0:
            # Moments of few tokens are singular but for rounding, which may be negative: no step is
            # safe there.
            break
        length = power / curvature
        n = n + length * direction
        residual = residual - length * image
        step = left @ residual @ right
        before = power
        power = (residual * step).sum()
        direction = step + power / before * direction
    return n


def _pseudo_inverse(matrix: Tensor, ridge: float) -> Tensor:
    """Inverse of a positive semi-definite matrix with `ridge` of its mean eigenvalue added."""
    eye = torch.eye(len(matrix)).to(matrix)
    return torch.linalg.inv(
        matrix + ridge * (matrix.diagonal().mean() + torch.finfo(matrix.dtype).tiny) * eye
    )


def _size_factor(grams: Tensor, which: Tensor, basis: Tensor, dim: int) -> Tensor:
    """Return the factor `[]` that gives the shared head the members' root-mean-square per dim.

    Args:
        dim: Dims of a member, f.
    """
    pooled = grams.mean(0)
    shared = ((pooled @ basis) * basis).sum() * dim / basis.shape[1]
    members = pooled.diagonal().view(-1, dim).sum(1)[which].mean()
    return (members / shared).sqrt() if shared > 0 else torch.ones_like(shared)


# ---- rotary pairs -----------------------------------------------------------------------------


def complex_gram(rows: Tensor, moment: Tensor, layout: RotaryLayout) -> Tensor:
    """Return the Gram of heads in their rotary pairs, `[P, H, H]` complex.

    It is the mean of z_i conj(z_j), where z = y_first + i y_second, of the outputs y of rows
    `[H, d, e]` whose inputs have this moment `[e, e]`. Of their Gram only the blocks of pairs are
    multiplied.
    """

    def pairs(y: Tensor) -> Tensor:
        return torch.complex(y[:, list(layout.first)], y[:, list(layout.second)]).transpose(0, 1)

    return pairs(rows @ moment.to(rows)) @ pairs(rows).mH


def pair_energy(power: Tensor, layout: RotaryLayout) -> Tensor:
    """Mean |q|^2 in each rotary pair: mean squares `[H, d]` -> `[P, H]`."""
    return (power[:, list(layout.first)] + power[:, list(layout.second)]).T


def fit_complex(gram: Tensor, energy: Tensor, width: int = 1) -> tuple[Tensor, Tensor]:
    """Return the m shared keys of each pair and each member's complex scales.

    N `[m, P, g]` and s `[m, P, g]`, m = `width`.

    z'_j = sum_i conj(N_ji) z_i and z_i ~ sum_j s_ji z'_j. gram `[P, g, g]` from `complex_gram`,
    energy `[P, g]` the members' mean query energy. Both come from the m leading eigenvectors of the
    weighted Gram sqrt(e_i) G_ij sqrt(e_j), whose z'_j are unrelated, so that each is fitted alone.
    Any mix of heads within one frequency commutes with the rotation. The free modulus is fixed so
    that z'_j has the members' mean energy, the free phase so that the heaviest member keeps its
    own.
    """
    tiny = torch.finfo(energy.dtype).tiny
    weight = energy.clamp_min(CUTOFF * energy.amax(1, keepdim=True)).clamp_min(tiny).sqrt()
    values, vectors = torch.linalg.eigh(weight[:, :, None] * gram * weight[:, None, :])
    members = weight.shape[1]
    # Members that are the same head leave nothing but rounding beyond the different ones
    least = CUTOFF * values[:, -1].clamp_min(0)
    fits = [
        _shared_key(gram, weight, vectors[:, :, members - 1 - j], least * (j > 0))
        for j in range(min(width, members))
    ]
    mixes, scales = (torch.stack(part) for part in zip(*fits, strict=True))
    # There are no more keys than members
    missing = (0, 0, 0, 0, 0, max(0, width - members))
    return pad(mixes, missing), pad(scales, missing)


def _shared_key(
    gram: Tensor, weight: Tensor, leading: Tensor, least: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the shared key of each pair along one eigenvector, and each member's scale.

    Args:
        gram: `[P, g, g]`.
        weight: Roots of the members' energy, `[P, g]`.
        leading: `[P, g]`.
        least: Power of a shared key, `[P]`, up to which there is none.

    Returns:
        N and s, `[P, g]` each.
    """
    heaviest = leading.gather(1, leading.abs().argmax(1, keepdim=True))
    mix = leading * (heaviest.conj() / heaviest.abs()) * weight
    cross = torch.einsum("pij,pj->pi", gram, mix)  # mean of z_i conj(z')
    shared = torch.einsum("pi,pi->p", mix.conj(), cross).real
    members = gram.diagonal(dim1=1, dim2=2).real.mean(1)
    alive = shared > least
    size = torch.where(alive, members / _safe(shared, alive), 1.0).sqrt()[:, None]
    scale = torch.where(
        alive[:, None], cross / _safe(shared, alive)[:, None] / size, torch.zeros_like(cross)
    )
    # A pair without any keys or queries stays the plain mean.
    return torch.where(alive[:, None], mix * size, torch.full_like(mix, 1 / mix.shape[1])), scale


def complex_error(gram: Tensor, energy: Tensor, width: int = 1) -> Tensor:
    """All but the `width` leading eigenvalues of the weighted Gram, over all pairs.

    `[..., P, g, g]`, `[..., P, g]` -> `[...]`.

    Halved: at a random phase between query and key, Re(conj(q) dz) has half the energy of |q|^2
    |dz|^2.
    """
    weight = energy.clamp_min(0).sqrt()
    values = torch.linalg.eigvalsh(weight[..., :, None] * gram * weight[..., None, :])
    return values[..., :-width].clamp_min(0).sum((-1, -2)) / 2
