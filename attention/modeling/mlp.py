"""The MLP of each layer, as its projections.

Its inputs (rows are neurons) and its output (columns are).

Legend: F neurons, D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.families import geometry_of
from attention.modeling.shared_weights import SharedProjection

LAYOUTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("fc1",), "fc2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)


@dataclass(frozen=True)
class MlpSite:
    """The MLP of one layer: `module` and the names of its projections there."""

    module: nn.Module
    inputs: tuple[str, ...]
    output: str

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.inputs, self.output)

    def projection(self, name: str) -> Any:
        return getattr(self.module, name)

    @property
    def neurons(self) -> int:
        return self.projection(self.output).in_features


@dataclass(frozen=True)
class MlpWeights:
    """Copies of one MLP's weights.

    Inputs `[F, D]` each and the output `[D, F]`, with their biases or None.
    """

    inputs: tuple[Tensor, ...]
    output: Tensor
    biases: tuple[Tensor | None, ...]


def mlp_sites(model: PreTrainedModel) -> list[MlpSite]:
    """Return the MLP of every layer that a plan of the model has.

    Raises:
        ValueError: For a family whose MLP is not made of linear layers (GPT-2).
    """
    decoder: Any = model.get_decoder()
    sites = []
    layers = getattr(decoder, "layers", ())
    indices = geometry_of(model.config).decoder_layers or range(len(layers))
    for layer in (layers[index] for index in indices):
        module = getattr(layer, "mlp", layer)
        for inputs, output in LAYOUTS:
            parts = [getattr(module, name, None) for name in (*inputs, output)]
            if all(isinstance(projection, nn.Linear | SharedProjection) for projection in parts):
                sites.append(MlpSite(module, inputs, output))
    if len(sites) != geometry_of(model.config).num_layers:
        raise ValueError(
            f"the MLPs of {model.config.model_type} cannot be shared: expected linear projections "
            f"called one of "
            f"{[(*inputs, output) for inputs, output in LAYOUTS]} in every layer; share attention "
            f"heads only"
        )
    return sites


def read_mlp(site: MlpSite) -> MlpWeights:
    """Return the weights of one MLP, shared blocks included."""
    projections = [site.projection(name) for name in site.names]
    weights = [p.weight.detach() for p in projections]
    biases = tuple(None if p.bias is None else p.bias.detach() for p in projections)
    return MlpWeights(tuple(weights[:-1]), weights[-1], biases)


@torch.no_grad()
def write_mlp(site: MlpSite, weights: MlpWeights) -> None:
    """Copy weights into an MLP, except the blocks that it borrows."""
    for name, weight, bias in zip(
        site.names, (*weights.inputs, weights.output), weights.biases, strict=True
    ):
        projection = site.projection(name)
        if isinstance(projection, SharedProjection):
            projection.write(weight, bias)  # type: ignore[operator]
        else:
            projection.weight.copy_(weight)
            if bias is not None:
                projection.bias.copy_(bias)


def copy(old: PreTrainedModel, new: PreTrainedModel) -> None:
    """Copy every MLP of `old` into `new`, with any sharing of their blocks."""
    for source, target in zip(mlp_sites(old), mlp_sites(new), strict=True):
        write_mlp(target, read_mlp(source))


def block_size(neurons: int, blocks: int) -> int:
    """Neurons of a block: F // H.

    The F % H last neurons belong to no block and are never shared.
    """
    return neurons // blocks


def blocks_of(weights: MlpWeights, blocks: int) -> Sequence[Tensor]:
    """Return the input side of each MLP block, `[H, F // H, D]` for each input projection."""
    size = block_size(weights.inputs[0].shape[0], blocks)
    return [w[: blocks * size].unflatten(0, (blocks, size)) for w in weights.inputs]
