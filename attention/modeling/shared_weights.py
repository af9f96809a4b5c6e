"""Projections that use blocks of an earlier layer's projection.

Each weight is stored once, by one module.

Legend: n output (or input) features in H blocks, D the other side; x `[..., D]` (rows) or `[...,
n]` (columns).

A block is a head's d rows of a q, k or v projection, or a slice of an MLP's neurons. The earlier
projection *lends* the block; the later one stores a plain reference to that module (not a
submodule) and registers as parameters only what it owns, so that `parameters()`, `state_dict()`,
the optimiser and safetensors see every weight once. Blocks are multiplied in place. A lender's
weight is read as its attribute in each forward pass, where ZeRO 3 gathers it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_OWN = -1


@dataclass(frozen=True)
class Piece:
    """Features of a projection: `size` of part `part` of `owner` (OWN, or a lender's index)."""

    owner: int
    part: int
    size: int


class SharedProjection(nn.Module):
    """A linear layer of which some blocks along `dim` of its weight belong to earlier projections.

    `like`: the stock projection that it replaces (shape, bias, dtype, device). `borrowed[b] =
    (lender, block)`: block b of this projection is that block of the lender, an `nn.Linear` or
    another SharedProjection which owns it. Features beyond `blocks * size` belong to no block and
    are owned.
    """

    dim: int
    own_weight: nn.Parameter | None
    own_bias: nn.Parameter | None

    def __init__(
        self, like: nn.Linear, blocks: int, size: int, borrowed: Mapping[int, tuple[nn.Module, int]]
    ) -> None:
        super().__init__()
        self.in_features = like.in_features
        self.out_features = like.out_features
        self.block_size = size
        total = like.weight.shape[self.dim]
        if not borrowed or not blocks * size <= total:
            raise ValueError(
                f"expected shared blocks among {blocks} of {size} in {total} features, got "
                f"{borrowed}"
            )
        # A tuple, not a ModuleList: the lenders are submodules elsewhere, and must be found there
        # only.
        self._lenders = tuple(dict.fromkeys(lender for lender, _ in borrowed.values()))
        self._splits = tuple(
            _cut({b for other, b in borrowed.values() if other is lender}, lender, size, self.dim)
            for lender in self._lenders
        )
        self._pieces = tuple(self._plan(blocks, size, borrowed, total))
        self._own_sizes = [piece.size for piece in self._pieces if piece.owner == _OWN]
        self._borrowed = frozenset(borrowed)
        owned = sum(self._own_sizes)
        like_this = {"device": like.weight.device, "dtype": like.weight.dtype}
        shape = (owned, like.in_features) if self.dim == 0 else (like.out_features, owned)
        self.own_weight = nn.Parameter(torch.empty(shape, **like_this)) if owned else None
        rows = owned if self.dim == 0 else like.out_features
        self.own_bias = (
            nn.Parameter(torch.empty(rows, **like_this)) if like.bias is not None and rows else None
        )
        self.reset_parameters()

    def _plan(
        self, blocks: int, size: int, borrowed: Mapping[int, tuple[nn.Module, int]], total: int
    ) -> Iterator[Piece]:
        """Pieces in the order of the features; neighbouring owned blocks are one piece."""
        run = 0
        runs = 0
        for block in range(blocks):
            if block not in borrowed:
                run += size
                continue
            if run:
                yield Piece(_OWN, runs, run)
                run = 0
                runs = runs + 1
            lender, theirs = borrowed[block]
            index = self._lenders.index(lender)
            yield Piece(index, _part(self._splits[index], _offset(lender, theirs, size)), size)
        run += total - blocks * size
        if run:
            yield Piece(_OWN, runs, run)

    def reset_parameters(self) -> None:
        """Fresh owned weights, as `nn.Linear` starts."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in (self.own_weight, self.own_bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def offset(self, block: int) -> int:
        """Return an owned block's offset in `own_weight`. Raises ValueError for a borrowed one."""
        if block in self._borrowed:
            raise ValueError(f"block {block} is itself shared; resolve chains to their roots first")
        return self.block_size * (block - sum(other < block for other in self._borrowed))

    def _weights(self) -> list[tuple[Tensor, ...]]:
        """Return the weight of each lender in parts, and the owned one last, at index `_OWN`."""
        parts = [
            _weight(m).split(s, self.dim) for m, s in zip(self._lenders, self._splits, strict=True)
        ]
        return [
            *parts,
            () if self.own_weight is None else self.own_weight.split(self._own_sizes, self.dim),
        ]

    def _biases(self) -> list[tuple[Tensor, ...]]:
        parts = []
        for lender, sizes in zip(self._lenders, self._splits, strict=True):
            bias = stored(lender)[1]
            parts.append(() if bias is None else bias.split(sizes))
        return [*parts, () if self.own_bias is None else self.own_bias.split(self._own_sizes)]

    @property
    def weight(self) -> Tensor:
        """The whole weight `[out_features, in_features]`, put together anew at every access.

        To read, not to change.
        """
        parts = self._weights()
        return torch.cat([parts[piece.owner][piece.part] for piece in self._pieces], self.dim)

    def _owned(self, whole: Tensor, dim: int) -> Tensor:
        """Return the owned features of a whole weight or bias."""
        pieces = zip(
            self._pieces, whole.split([piece.size for piece in self._pieces], dim), strict=True
        )
        return torch.cat([t for piece, t in pieces if piece.owner == _OWN], dim)

    def extra_repr(self) -> str:
        return (
            f"in={self.in_features}, out={self.out_features}, shared "
            f"blocks={sorted(self._borrowed)}"
        )


class SharedRows(SharedProjection):
    """Blocks of output features: q, k, v, and the MLP's input projections.

    A block's bias comes with it.
    """

    dim = 0

    @property
    def bias(self) -> Tensor | None:
        """The whole bias `[out_features]`, put together anew at every access, or None."""
        parts = self._biases()
        if not any(parts):
            return None
        return torch.cat([parts[piece.owner][piece.part] for piece in self._pieces])

    def forward(self, x: Tensor) -> Tensor:
        owned = (
            ()
            if self.own_weight is None
            else F.linear(x, self.own_weight, self.own_bias).split(self._own_sizes, -1)
        )
        weights = self._weights()
        biases = self._biases()
        outputs: dict[Piece, Tensor] = {}  # two blocks may be the same one of a lender
        for piece in self._pieces:
            if piece.owner != _OWN and piece not in outputs:
                bias = biases[piece.owner][piece.part] if biases[piece.owner] else None
                outputs[piece] = F.linear(x, weights[piece.owner][piece.part], bias)
        return torch.cat(
            [owned[p.part] if p.owner == _OWN else outputs[p] for p in self._pieces], -1
        )

    @torch.no_grad()
    def write(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy the owned blocks of a whole weight and bias.

        Borrowed blocks are not changed.
        """
        if self.own_weight is not None:
            self.own_weight.copy_(self._owned(weight.reshape(self.out_features, -1), 0))
            if self.own_bias is not None and bias is not None:
                self.own_bias.copy_(self._owned(bias.reshape(-1), 0))


class SharedColumns(SharedProjection):
    """Blocks of input features: the MLP's output projection. The bias is the layer's own."""

    dim = 1

    @property
    def bias(self) -> Tensor | None:
        return self.own_bias

    def forward(self, x: Tensor) -> Tensor:
        weights = self._weights()
        owned = []
        inputs = dict[Piece, Tensor]()
        for piece, part in zip(
            self._pieces, x.split([p.size for p in self._pieces], -1), strict=True
        ):
            if piece.owner == _OWN:
                owned.append(part)
            else:
                inputs[piece] = inputs[piece] + part if piece in inputs else part
        terms = [F.linear(part, weights[piece.owner][piece.part]) for piece, part in inputs.items()]
        if self.own_weight is not None:
            return sum(terms, F.linear(torch.cat(owned, -1), self.own_weight, self.own_bias))
        return sum(terms[1:], terms[0]) if self.own_bias is None else sum(terms, self.own_bias)

    @torch.no_grad()
    def write(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy the owned columns of a whole weight, and the bias."""
        if self.own_weight is not None:
            self.own_weight.copy_(self._owned(weight, 1))
        if self.own_bias is not None and bias is not None:
            self.own_bias.copy_(bias)


def stored(projection: nn.Module) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """Weight and bias that a projection owns."""
    names = (
        ("own_weight", "own_bias")
        if isinstance(projection, SharedProjection)
        else ("weight", "bias")
    )
    return getattr(projection, names[0]), getattr(projection, names[1])


def _weight(projection: nn.Module) -> nn.Parameter:
    weight = stored(projection)[0]
    if weight is None:
        raise ValueError(f"{projection} lends a block but owns none")
    return weight


def _offset(lender: nn.Module, block: int, size: int) -> int:
    return lender.offset(block) if isinstance(lender, SharedProjection) else block * size


def _cut(blocks: set[int], lender: nn.Module, size: int, dim: int) -> list[int]:
    """Sizes that split a lender's weight so that each of its `blocks` is a part."""
    starts = {_offset(lender, block, size) for block in blocks}
    marks = sorted({0, _weight(lender).shape[dim]} | starts | {start + size for start in starts})
    return [b - a for a, b in pairwise(marks)]


def _part(sizes: Sequence[int], start: int) -> int:
    """Return the index of the part that begins at `start`."""
    position = 0
    for index, size in enumerate(sizes):
        if position == start:
            return index
        position += size
    raise ValueError(f"no part of {sizes} starts at {start}")


def sharing_modules(model: nn.Module) -> set[str]:
    """Names of the projections that borrow or lend blocks.

    An adapter on one of these would change some users of a weight and, once merged, all of them:
    adapt others only.
    """
    borrowers = [module for module in model.modules() if isinstance(module, SharedProjection)]
    involved = {id(m) for borrower in borrowers for m in (borrower, *borrower._lenders)}
    return {name for name, module in model.named_modules() if id(module) in involved}
