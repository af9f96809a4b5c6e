"""Heal: ridge refit of each output projection, layer by layer, on inputs from the already converted layers below.

Legend: N tokens, F = H·d features (the mixed values of all heads, one constant more with a bias), D model dim,
Z `[N, F]` features of the converted model, Y `[N, D]` target, W `[F, D]` the output projection.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.axes import Knob
from attention.conversion.refinement.axis import REFINEMENT, LayerFit, RefinementReport
from attention.conversion.refinement.capture import Record, held_out, recorded
from attention.families import family_of, geometry_of
from attention.heads import LayerHeads
from attention.modeling.modeling import plan_of

HEAL_KNOBS = (
    Knob("ridge", "log_float", 1e-3, "pull towards the present weights, relative to the features' power", 1e-8, 1.0),
    Knob("carry", "float", 1.0, "share of the error of the layers below that the refit also tries to undo", 0.0, 1.0),
    Knob("batch_size", "int", 8, "sequences run at once", 1, 1024),
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


def _moments(
    models: tuple[PreTrainedModel, PreTrainedModel],
    modules: tuple[nn.Module, nn.Module],
    sequences: Tensor,
    carry: float,
    bias: bool,
    batch_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`Z^T Z [F, F]`, `Z^T Y [F, D]` and `sum Y^2`, Y = the original's attention + carry x (stream difference)."""
    zz = zy = yy = torch.zeros((), dtype=torch.float64)
    pairs = zip(*(recorded(m, a, sequences, batch_size) for m, a in zip(models, modules, strict=True)), strict=True)
    for original, converted in pairs:
        z = _features(converted, bias)
        y = original.output.double() + carry * (original.stream.double() - converted.stream.double())
        y = y.flatten(0, 1)
        zz, zy, yy = zz + z.T @ z, zy + z.T @ y, yy + (y * y).sum()
    return zz, zy, yy


def _error(weight: Tensor, zz: Tensor, zy: Tensor, yy: Tensor) -> float:
    """`|Z W - Y|^2 / |Y|^2` from the moments."""
    return ((weight * (zz @ weight)).sum() - 2 * (weight * zy).sum() + yy).div(yy).item()


def ridge_refit(weight: Tensor, zz: Tensor, zy: Tensor, ridge: float) -> Tensor:
    """argmin over V of `|Z V - Y|^2 + lambda |V - W|^2`, lambda = ridge x mean diagonal of `Z^T Z`."""
    penalty = ridge * zz.diagonal().mean() * torch.eye(len(zz), dtype=zz.dtype, device=zz.device)
    return weight + torch.linalg.solve(zz + penalty, zy - zz @ weight)


def heal_layer(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    sequences: Tensor,
    layer: int,
    knobs: dict[str, Any],
    first: int = 0,
) -> LayerFit:
    """Refit the output projection of one layer of `converted` in place, if that helps on held-out sequences.

    The layer is reported as number `first + layer`. Raises ValueError for a model whose layers share output
    projections.
    """
    if shares := plan_of(converted).output_shares:
        raise ValueError(
            f"a refit of one layer's output projection would change the {len(shares)} heads that share theirs in other "
            "layers; train the whole model, or leave sharing.output false"
        )
    family, geometry = family_of(converted.config), geometry_of(converted.config)
    models = (original, converted)
    modules = tuple(family_of(m.config).attention_modules(m)[layer] for m in models)
    fit, check = held_out(sequences)
    heads = family.read(modules[1], geometry)
    bias = heads.o_bias is not None
    common = {"carry": knobs["carry"], "bias": bias, "batch_size": knobs["batch_size"]}
    zz, zy, _ = _moments(models, modules, fit, **common)  # type: ignore[arg-type]
    weight = _weight(heads)
    fitted = ridge_refit(weight, zz, zy, knobs["ridge"])
    checked = _moments(models, modules, check, **common)  # type: ignore[arg-type]
    result = LayerFit("heal", first + layer, _error(weight, *checked), _error(fitted, *checked))
    if result.kept:
        family.write(modules[1], _with_weight(heads, fitted))
    return result


@REFINEMENT.part(
    "heal",
    source="ours (docs/methods.md, section 6): ridge refit of W_O, layer by layer",
    knobs=HEAL_KNOBS,
    needs=("sequences",),
)
def heal(
    original: PreTrainedModel, converted: PreTrainedModel, sequences: Tensor, *, first: int = 0, **knobs: Any
) -> RefinementReport:
    """Refit every layer's output projection, from the first layer to the last."""
    layers = geometry_of(converted.config).num_layers
    return RefinementReport(tuple(heal_layer(original, converted, sequences, i, knobs, first) for i in range(layers)))
