"""Heal: ridge refit of each output projection, layer by layer, on inputs from the already converted layers below.

Legend: N tokens, F = H·d features (the mixed values of all heads, one constant more with a bias), D model dim,
Z `[N, F]` features of the converted model, Y `[N, D]` target, W `[F, D]` the output projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.axes import Knob
from attention.conversion.refinement.capture import Record, held_out, recorded
from attention.conversion.refinement.refine import REFINEMENT, LayerFit
from attention.families import family_of, geometry_of
from attention.heads import LayerHeads
from attention.modeling.modeling import plan_of
from attention.modeling.running import Streams
from attention.progress import stage

Models = tuple[Streams, ...]  # the original model and the converted one, on the same sequences
HEAL_KNOBS = (
    Knob("ridge", "log_float", "pull towards the present weights, relative to the features' power", 1e-8, 1.0),
    Knob("carry", "float", "share of the error of the layers below that the refit also tries to undo", 0.0, 1.0),
    Knob("batch_size", "int", "sequences run at once", 1, 1024),
)


def _weight(heads: LayerHeads) -> Tensor:
    """`[F, D]` float64: the output projection, its bias as last row."""
    weight = heads.o.permute(0, 2, 1).flatten(0, 1).double()
    return weight if heads.o_bias is None else torch.cat([weight, heads.o_bias.double()[None]])


def _with_weight(heads: LayerHeads, weight: Tensor) -> LayerHeads:
    if heads.o_bias is not None:
        heads, weight = replace(heads, o_bias=weight[-1].to(heads.o_bias)), weight[:-1]
    H, D, d = heads.o.shape
    return replace(heads, o=weight.view(H, d, D).transpose(1, 2).to(heads.o))


def _features(record: Record, bias: bool) -> Tensor:
    if record.mixed is None:
        raise ValueError("only a Headfold model can be healed; convert it first")
    z = record.mixed.flatten(0, 1).double()
    return torch.cat([z, torch.ones_like(z[:, :1])], 1) if bias else z


def _pairs(models: Models, layer: int, carry: float, bias: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Z and Y = the original's attention + carry x (stream difference), a batch at a time."""
    for original, converted in zip(*(recorded(streams, layer) for streams in models), strict=True):
        y = original.output.double() + carry * (original.stream.double() - converted.stream.double())
        yield _features(converted, bias), y.flatten(0, 1)


def _moments(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`Z^T Z [F, F]` and `Z^T Y [F, D]`."""
    zz = zy = torch.zeros((), dtype=torch.float64)
    for z, y in pairs:
        zz, zy = zz + z.T @ z, zy + z.T @ y
    return zz, zy


def _errors(weights: Sequence[Tensor], pairs: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """`|Z W - Y|^2 / |Y|^2` of each W."""
    missed, power = torch.zeros(len(weights), dtype=torch.float64), 0.0
    for z, y in pairs:
        power += y.square().sum().item()
        missed += torch.tensor([(z @ w - y).square().sum().item() for w in weights], dtype=torch.float64)
    return (missed / power).tolist()


def ridge_refit(weight: Tensor, zz: Tensor, zy: Tensor, ridge: float) -> Tensor:
    """argmin over V of `|Z V - Y|^2 + lambda |V - W|^2`, lambda = ridge x mean diagonal of `Z^T Z`."""
    penalty = ridge * zz.diagonal().mean() * torch.eye(len(zz), dtype=zz.dtype, device=zz.device)
    return weight + torch.cholesky_solve(zy - zz @ weight, torch.linalg.cholesky(zz + penalty))


def heal_layer(fit: Models, check: Models, layer: int, number: int, ridge: float, carry: float) -> LayerFit:
    """Refit one layer's output projection of the converted model in place, if that helps on the sequences of `check`.
    `number`: of the layer in its checkpoint. Raises ValueError for shared output projections."""
    converted, module = fit[1].model, fit[1].modules[layer]
    if shares := plan_of(converted).output_shares:
        raise ValueError(
            f"a refit of one layer's output projection would change the {len(shares)} heads that share theirs in other "
            "layers; train the whole model, or leave sharing.output false"
        )
    family, geometry = family_of(converted.config), geometry_of(converted.config)
    heads = family.read(module, geometry)
    bias = heads.o_bias is not None
    zz, zy = _moments(_pairs(fit, layer, carry, bias))
    weight = _weight(heads)
    fitted = ridge_refit(weight, zz, zy, ridge)
    before, after = _errors([weight, fitted], _pairs(check, layer, carry, bias))
    result = LayerFit("heal", number, before, after)
    if result.kept:
        family.write(module, _with_weight(heads, fitted))
    return result


@REFINEMENT.part(
    "heal",
    source="ours (docs/methods.md, section 6): ridge refit of W_O, layer by layer",
    knobs=HEAL_KNOBS,
    needs=("sequences",),
)
def heal(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    sequences: Tensor,
    *,
    first: int = 0,
    ridge: float = 1e-3,
    carry: float = 1.0,
    batch_size: int = 8,
) -> tuple[LayerFit, ...]:
    """Refit every layer's output projection, from the first layer to the last."""
    layers, fits = range(geometry_of(converted.config).num_layers), []
    both = [(model, family_of(model.config).attention_modules(model)) for model in (original, converted)]
    fit, check = (tuple(Streams(*model, part, batch_size) for model in both) for part in held_out(sequences))
    with stage("refitting output projections", len(layers), "layers") as told:
        for layer in layers:
            fits.append(heal_layer(fit, check, layer, first + layer, ridge, carry))
            told.step()
    return tuple(fits)
