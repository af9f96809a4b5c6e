"""The two factorisations behind least-squares fusion: real rank f, and complex rank 1 for each rotary pair.

Legend: g members of a group, d head dim, f dims treated by the real form, P = r/2 rotary pairs, y_i the activations of
member i. Both find one shared head y' = sum_i N_i^T y_i and, for each member, the map that reads y_i back from y'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.geometry import RotaryLayout
from attention.modeling.rotary import pair_products

# Relative size of an eigenvalue below which a direction counts as absent: moments are sums of float32 products.
CUTOFF = 1e-10


@dataclass(frozen=True)
class RealFit:
    """basis N `[g, f, f]`, back L `[g, f, f]` with y_i ~ L_i y', errors `[g]`: the mean of |R_i (y_i - L_i y')|^2."""

    basis: Tensor
    back: Tensor
    errors: Tensor


def fit_real(grams: Tensor, metrics: Tensor, *, sweeps: int = 0) -> RealFit:
    """The shared head of g members, each under its own covariance and its own metric.

    grams `[g, g, g, f, f]`: entry [h, i, j] is the mean of y_i y_j^T under the covariance that member h sees. metrics
    `[g, f, f]`: R_h^T R_h, how the error of member h counts. The basis is exact for the mean of the covariances; each
    read-back is exact for its own. With equal covariances that is the optimum (Eckart and Young), otherwise each of
    `sweeps` rounds solves the basis for the read-backs and the read-backs for the basis, which only lowers the error.
    """
    members, dim = metrics.shape[:2]
    flat = grams.transpose(2, 3).reshape(members, members * dim, members * dim)
    basis = _leading_basis(flat.mean(0), symmetric_root(metrics))
    back, errors = _read_back(flat, metrics, basis)
    energy = torch.einsum("hab,hhhab->", metrics, grams)
    for _ in range(sweeps):
        if errors.sum() <= CUTOFF * energy:
            break  # the fit is exact already, or there is nothing to fit
        refitted = _refit_basis(flat, metrics, back, basis)
        fitted, missed = _read_back(flat, metrics, refitted)
        if not missed.sum() < errors.sum():
            break  # only rounding is left to fit
        basis, back, errors = refitted, fitted, missed
    size = _size_factor(flat, basis)
    return RealFit((basis * size).view(members, dim, dim), back / size, errors)


def symmetric_root(matrices: Tensor) -> Tensor:
    """A symmetric R with R^T R = the given positive semi-definite matrix, `[..., f, f]`."""
    values, vectors = torch.linalg.eigh(matrices)
    return (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.transpose(-1, -2)


def _positive(values: Tensor) -> Tensor:
    """Mask of ascending eigenvalues that stand above rounding."""
    return values > CUTOFF * values[..., -1:].clamp_min(torch.finfo(values.dtype).tiny)


def _safe(values: Tensor, alive: Tensor) -> Tensor:
    return torch.where(alive, values, torch.ones_like(values))


def _leading_basis(gram: Tensor, roots: Tensor) -> Tensor:
    """N `[g f, f]` of the best rank-f fit under one covariance, gram `[g f, g f]`, roots `[g, f, f]`.

    The leading f eigenvectors of the weighted Gram [R_i G_ij R_j^T]: the rank-d factorisation of C^(1/2) M by SVD
    (docs/methods.md, section 6), written in the members' own coordinates, among which its solution always lies. The
    directions are scaled halfway between the members' coordinates and unit variance.
    """
    dim = roots.shape[1]
    weight = torch.block_diag(*roots)
    weighted = weight @ gram @ weight.T
    values, vectors = torch.linalg.eigh((weighted + weighted.T) / 2)
    values, vectors = values[-dim:], vectors[:, -dim:]
    alive = _positive(values)
    return weight.T @ (vectors * (_safe(values, alive).pow(-0.25) * alive))


def _read_back(flat: Tensor, metrics: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """L `[g, f, f]`, the least-squares map from the shared head to each member under its own covariance, and errors.

    flat `[g, g f, g f]`, basis `[g f, f]`. L is the best in every metric at once, so the metric enters errors alone.
    """
    members, dim = metrics.shape[:2]
    seen = flat @ basis
    own = torch.arange(members)
    cross = seen.view(members, members, dim, dim)[own, own]  # mean of y_h y'^T
    shared = basis.T @ seen
    values, vectors = torch.linalg.eigh((shared + shared.transpose(1, 2)) / 2)
    alive = _positive(values)
    back = cross @ (vectors * (alive / _safe(values, alive))[:, None, :]) @ vectors.transpose(1, 2)
    moment = flat.view(members, members, dim, members, dim)[own, own, :, own]
    missed = moment - back @ cross.transpose(1, 2)
    return back, torch.einsum("hab,hab->h", metrics, missed).clamp_min(0)


def _refit_basis(flat: Tensor, metrics: Tensor, back: Tensor, start: Tensor) -> Tensor:
    """The best N for given L: sum_h C_h N L_h^T P_h L_h = sum_h C_h[:, h] P_h L_h, by conjugate gradients from `start`.

    Preconditioned by the same equation under the mean covariance and the mean of L^T P L, which is solved directly;
    so a few iterations do, and every one of them lowers the error.
    """
    members, dim = metrics.shape[:2]
    weights = back.transpose(1, 2) @ metrics @ back
    own = torch.arange(members)
    columns = flat.view(members, members * dim, members, dim)[own, :, own]
    left, right = (_pseudo_inverse(m.mean(0), 1e-7) for m in (flat, weights))

    def apply(n: Tensor) -> Tensor:
        return (flat @ n @ weights).sum(0)

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
            break  # moments of few tokens are singular but for rounding, which may be negative: no step is safe there
        length = power / curvature
        n = n + length * direction
        residual = residual - length * image
        step = left @ residual @ right
        before, power = power, (residual * step).sum()
        direction = step + power / before * direction
    return n


def _pseudo_inverse(matrix: Tensor, ridge: float) -> Tensor:
    """Inverse of a positive semi-definite matrix with `ridge` of its mean eigenvalue added."""
    eye = torch.eye(len(matrix)).to(matrix)
    return torch.linalg.inv(matrix + ridge * (matrix.diagonal().mean() + torch.finfo(matrix.dtype).tiny) * eye)


def _size_factor(flat: Tensor, basis: Tensor) -> Tensor:
    """What the shared head must be multiplied by to have the members' root-mean-square norm, `[]`."""
    pooled = flat.mean(0)
    shared = ((pooled @ basis) * basis).sum()
    members = pooled.diagonal().sum() / (len(flat))
    return (members / shared).sqrt() if shared > 0 else torch.ones_like(shared)


# ---- rotary pairs -----------------------------------------------------------------------------------------------


def complex_gram(gram: Tensor, layout: RotaryLayout) -> Tensor:
    """Real Gram `[H, H, d, d]` -> `[P, H, H]` complex: mean of z_i conj(z_j), where z = y_first + i y_second."""
    return torch.complex(*pair_products(gram, layout)).permute(2, 0, 1)


def pair_energy(moment: Tensor, layout: RotaryLayout) -> Tensor:
    """Mean |q|^2 in each rotary pair: `[H, d, d]` moments -> `[P, H]`."""
    diagonal = moment.diagonal(dim1=-2, dim2=-1)
    return (diagonal[:, list(layout.first)] + diagonal[:, list(layout.second)]).T


def fit_complex(gram: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """The shared key of each pair and each member's complex scale: N `[P, g]` and s `[P, g]`.

    z' = sum_i conj(N_i) z_i and z_i ~ s_i z'. gram `[P, g, g]` from `complex_gram`, energy `[P, g]` the members' mean
    query energy. Both come from the leading eigenvector of the weighted Gram sqrt(e_i) G_ij sqrt(e_j). The free modulus
    is fixed so that z' has the members' mean energy, the free phase so that the heaviest member keeps its own.
    """
    tiny = torch.finfo(energy.dtype).tiny
    weight = energy.clamp_min(CUTOFF * energy.amax(1, keepdim=True)).clamp_min(tiny).sqrt()
    _, vectors = torch.linalg.eigh(weight[:, :, None] * gram * weight[:, None, :])
    leading = vectors[:, :, -1]
    heaviest = leading.gather(1, leading.abs().argmax(1, keepdim=True))
    mix = leading * (heaviest.conj() / heaviest.abs()) * weight
    cross = torch.einsum("pij,pj->pi", gram, mix)  # mean of z_i conj(z')
    shared = torch.einsum("pi,pi->p", mix.conj(), cross).real
    members = gram.diagonal(dim1=1, dim2=2).real.mean(1)
    alive = shared > 0
    size = torch.where(alive, members / _safe(shared, alive), 1.0).sqrt()[:, None]
    scale = torch.where(alive[:, None], cross / _safe(shared, alive)[:, None] / size, torch.zeros_like(cross))
    # A pair without any keys or queries stays the plain mean.
    return torch.where(alive[:, None], mix * size, torch.full_like(mix, 1 / mix.shape[1])), scale


def complex_error(gram: Tensor, energy: Tensor) -> Tensor:
    """All but the leading eigenvalue of the weighted Gram, over all pairs: `[..., P, g, g]`, `[..., P, g]` -> `[...]`.

    Halved: at a random phase between query and key, Re(conj(q) dz) has half the energy of |q|^2 |dz|^2.
    """
    weight = energy.clamp_min(0).sqrt()
    values = torch.linalg.eigvalsh(weight[..., :, None] * gram * weight[..., None, :])
    return values[..., :-1].clamp_min(0).sum((-1, -2)) / 2
