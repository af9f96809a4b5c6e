"""Heal.

Ridge refit of each output projection, layer by layer, on inputs from the already converted layers
below.

Legend: N tokens, F = H·d features (the mixed values of all heads, one constant more with a bias), D
model dim, Z `[N, F]` features of the converted model, Y `[N, D]` target, W `[F, D]` the output
projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.axes import Knob
from attention.base.progress import stage
from attention.conversion.refinement.capture import recorded, split_held_out
from attention.conversion.refinement.original import Original, Text
from attention.conversion.refinement.refine import REFINEMENT, LayerFit
from attention.families import family_of, geometry_of
from attention.heads import LayerHeads
from attention.modeling.model_classes import plan_of
from attention.modeling.running import AT_ONCE, Streams

HEAL_KNOBS = (
    Knob(
        "ridge",
        "log_float",
        "pull towards the present weights, relative to the features' power",
        1e-8,
        1.0,
    ),
    Knob(
        "carry",
        "float",
        "share of the error of the layers below that the refit also tries to undo",
        0.0,
        1.0,
    ),
    Knob("batch_size", "int", "sequences run at once, as far as they have 2,048 tokens", 1, 1024),
)


def _weight(heads: LayerHeads) -> Tensor:
    """`[F, D]` float64: the output projection, its bias as last row."""
    weight = heads.o.permute(0, 2, 1).flatten(0, 1).double()
    return weight if heads.o_bias is None else torch.cat([weight, heads.o_bias.double()[None]])


def _with_weight(heads: LayerHeads, weight: Tensor) -> LayerHeads:
    if heads.o_bias is not None:
        heads = replace(heads, o_bias=weight[-1].to(heads.o_bias))
        weight = weight[:-1]
    H, D, d = heads.o.shape
    return replace(heads, o=weight.view(H, d, D).transpose(1, 2).to(heads.o))


def _features(mixed: Tensor, bias: bool) -> Tensor:
    """Z in float32: products of a batch are, their sums over batches in float64."""
    z = mixed.flatten(0, 1).float()
    return torch.cat([z, torch.ones_like(z[:, :1])], 1) if bias else z


@dataclass
class SideBySide:
    """The original model and the converted one on the same sequences.

    `mixed` `[B, T, H·d]` of each batch: what the heads of the converted one's present layer hand to
    its output projection.
    """

    original: Text
    converted: Streams
    mixed: list[Tensor] = field(default_factory=list)

    def pairs(self, layer: int, carry: float, bias: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Z and Y = the original's attention + carry x (stream difference), a batch at a time.

        `carry` is in units of the output projection.
        """
        self.mixed = []
        for original, converted in zip(
            self.original.at(layer), recorded(self.converted, layer), strict=True
        ):
            if converted.mixed is None:
                raise ValueError("only a Headfold model can be healed; convert it first")
            self.mixed.append(converted.mixed)
            y = original.output.float() + carry * (
                original.stream.float() - converted.stream.float()
            )
            yield _features(converted.mixed, bias), y.flatten(0, 1)

    def advance(self, layer: int, heads: LayerHeads) -> None:
        """Bring the converted streams to the entrance of `layer`.

        Its attention below, of these `heads`, need not mix values again.
        """
        weight = _weight(heads).float()
        outputs = (
            (_features(m, heads.o_bias is not None) @ weight).to(m).view(*m.shape[:2], -1)
            for m in self.mixed
        )
        self.converted.advance(layer, outputs)


def _moments(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`Z^T Z [F, F]` and `Z^T Y [F, D]`."""
    zz = zy = torch.zeros((), dtype=torch.float64)
    for z, y in pairs:
        zz = zz + (z.T @ z).double()
        zy = zy + (z.T @ y).double()
    return zz, zy


def _errors(weights: Sequence[Tensor], pairs: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """`|Z W - Y|^2 / |Y|^2` of each W."""
    missed = power = torch.zeros((), dtype=torch.float64)
    weights = [weight.float() for weight in weights]
    for z, y in pairs:  # nothing here waits for a GPU
        power = power + y.square().sum(dtype=torch.float64)
        wrong = [(z @ w - y).square().sum(dtype=torch.float64) for w in weights]
        missed = missed + torch.stack(wrong)
    return (missed / power).tolist()


_MOST_RAISES = 12
"""Times that a ridge is raised: from the least that there may be to one that no rank needs."""


def ridge_refit(weight: Tensor, zz: Tensor, zy: Tensor, ridge: float) -> Tensor:
    """Return argmin over V of `|Z V - Y|^2 + lambda |V - W|^2`.

    lambda = ridge x mean diagonal of `Z^T Z`; ten times as large, as often as necessary, where the
    rank of Z needs it: few tokens for many features.

    Raises:
        ValueError: If Z is not finite.
    """
    scale = zz.diagonal().mean()
    if scale == 0:
        return weight
    penalty = ridge * scale * torch.eye(len(zz), dtype=zz.dtype, device=zz.device)
    for _ in range(_MOST_RAISES):
        factor, failed = torch.linalg.cholesky_ex(zz + penalty)
        if not failed:
            return weight + torch.cholesky_solve(zy - zz @ weight, factor)
        penalty = 10 * penalty
    raise ValueError("refinement=heal: inputs of an output projection are not finite")


def heal_layer(
    fit: SideBySide, check: SideBySide, layer: int, number: int, ridge: float, carry: float
) -> LayerFit:
    """Refit one layer's output projection of the converted model in place, if that helps.

    It helps if the error on `check` is lower. Both models are at the next layer afterwards.

    Args:
        fit: The models on the sequences to fit on.
        check: The models on the sequences to judge by.
        layer: Number of the layer in the models.
        number: Number of the layer in its checkpoint.
        ridge: Weight of the distance to the former projection.
        carry: Share of the stream difference that the target takes over; none of it in families
            that normalise the output projection before it is added to the stream.

    Raises:
        ValueError: For shared output projections.
    """
    converted = fit.converted.model
    module = fit.converted.modules[layer]
    if shares := plan_of(converted).output_shares:
        raise ValueError(
            f"a refit of one layer's output projection would change the {len(shares)} heads that "
            f"share theirs in other "
            "layers; train the whole model, or leave sharing.output false"
        )
    family = family_of(converted.config)
    geometry = geometry_of(converted.config)
    scale = family.residual_scale(converted.config)
    carry = carry / scale if scale else 0.0
    heads = family.read(module, geometry)
    bias = heads.o_bias is not None
    zz, zy = _moments(fit.pairs(layer, carry, bias))
    weight = _weight(heads)
    fitted = ridge_refit(weight, zz, zy, ridge)
    before, after = _errors([weight, fitted], check.pairs(layer, carry, bias))
    result = LayerFit("heal", number, before, after)
    if result.improves:
        family.write(module, _with_weight(heads, fitted))
    if layer + 1 < geometry.num_layers:
        for models in (fit, check):
            models.advance(layer + 1, family.read(module, geometry))
    return result


@REFINEMENT.part(
    "heal",
    source="ours (docs/methods.md, section 6): ridge refit of W_O, layer by layer",
    knobs=HEAL_KNOBS,
    needs=("sequences",),
)
def heal(
    original: Original,
    converted: PreTrainedModel,
    sequences: Tensor,
    *,
    first: int = 0,
    ridge: float = 1e-3,
    carry: float = 1.0,
    batch_size: int = AT_ONCE,
) -> tuple[LayerFit, ...]:
    """Refit every layer's output projection, from the first layer to the last."""
    layers = range(geometry_of(converted.config).num_layers)
    fits = []
    modules = family_of(converted.config).attention_modules(converted)

    def side_by_side(part: Tensor) -> SideBySide:
        return SideBySide(
            original.on(part, batch_size), Streams(converted, modules, part, batch_size)
        )

    fit, check = map(side_by_side, split_held_out(sequences))
    with stage("refitting output projections", len(layers), "layers") as progress:
        for layer in layers:
            fits.append(heal_layer(fit, check, layer, first + layer, ridge, carry))
            progress.step()
    return tuple(fits)
