"""Experts of an MLP: files hold a matrix for each, models of transformers 5 one tensor for all.

Both ways.

Legend: E experts, F rows of a matrix, D columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    dot_natural_key,
    revert_weight_conversion,
)

from attention.io.safetensors_files import Stored, WeightsError

PlacedTensor = tuple[Stored, Any]
"""A tensor of a file, and the index of its place in the model's tensor."""


@dataclass(frozen=True)
class Stacked:
    """A tensor `[E, sum of F, D]` of which the files hold the matrices.

    `experts[e]` are those of expert e, one below the other.
    """

    experts: tuple[tuple[Stored, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.experts[0]
        return (len(self.experts), sum(matrix.shape[0] for matrix in first), *first[0].shape[1:])

    @property
    def dtype(self) -> str:
        return self.experts[0][0].dtype


TensorSource = Stored | Stacked


def stacks(converter: WeightConverter) -> bool:
    """Whether `converter` of transformers does no more than `Stacked` describes."""
    merge, *more = converter.operations
    joined = all(isinstance(one, Concatenate) and one.dim == 1 for one in more)
    return isinstance(merge, MergeModulelist) and merge.dim == 0 and joined and len(more) < 2


def stacked(name: str, matrices: Mapping[str, Sequence[Stored]], order: Sequence[str]) -> Stacked:
    """Return the place of the model's tensor `name`.

    Args:
        matrices: Those of all experts, by the pattern that their names match.
        order: The patterns as their matrices follow each other.

    Raises:
        WeightsError: Unless all experts are alike.
    """
    columns = [
        sorted(matrices.get(one, []), key=lambda stored: dot_natural_key(stored.name))
        for one in order
    ]
    alike = all(len({(stored.shape, stored.dtype) for stored in column}) == 1 for column in columns)
    if not alike or len({len(column) for column in columns}) > 1:
        names = "; ".join(
            f"{len(column)} of {one.lstrip('.')}"
            for one, column in zip(order, columns, strict=True)
        )
        raise WeightsError(
            f"the experts of {name} differ in number, shape or dtype: the files hold {names}; "
            f"download or save the "
            "model again"
        )
    return Stacked(tuple(zip(*columns, strict=True)))


def parts_of(source: TensorSource) -> list[PlacedTensor]:
    """Return the tensors of files that a tensor of the model is read from."""
    if isinstance(source, Stored):
        whole: EllipsisType = ...
        return [(source, whole)]
    parts: list[PlacedTensor] = []
    for index, matrices in enumerate(source.experts):
        end = 0
        for matrix in matrices:
            start = end
            end = end + matrix.shape[0]
            parts.append((matrix, (index, slice(start, end))))
    return parts


def published(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model as its files hold them: what `save_pretrained` would write."""
    return revert_weight_conversion(model, dict(tensors))
