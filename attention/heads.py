"""The heads of one attention layer, as plain tensors, apart from any model class.

Legend: H query heads, G^K / G^V key / value heads, d head dim, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

QUERY_SIDE = ("q", "o", "q_bias", "q_norm", "sinks")
KEY_SIDE = ("k", "k_bias", "k_norm")
VALUE_SIDE = ("v", "v_bias")
"""The tensors that have an entry for each query, key or value head."""


@dataclass(frozen=True)
class LayerHeads:
    """Weights of one layer's heads.

    q `[H, d, D]`, k `[G^K, d, D]`, v `[G^V, d, D]`: rows of the projections; o `[H, D, d]`: the columns of the output
    projection that read head h. Biases: q `[H, d]`, k `[G^K, d]`, v `[G^V, d]`, o `[D]`, or None. Value heads may be
    of another width than key heads; o follows the values. Where a norm after projection has weights of each head's own,
    they are q_norm `[H, d]` and k_norm `[G^K, d]`. sinks `[H]`: a logit of each query head that takes attention weight
    and brings no value.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def num_heads(self) -> int:
        return self.q.shape[0]

    @property
    def head_dim(self) -> int:
        return self.q.shape[1]

    @property
    def hidden_size(self) -> int:
        return self.q.shape[2]

    def to(self, *args: object, **kwargs: object) -> LayerHeads:
        """Every tensor through `Tensor.to`."""
        return replace(
            self,
            **{
                f.name: t.to(*args, **kwargs)
                for f in fields(self)
                if (t := getattr(self, f.name)) is not None
            },
        )

    def mapped(self, **maps: Tensor) -> LayerHeads:
        """The heads of the projections named (q, k, v) times maps `[heads, d, d]`, with their biases; in float64."""
        changes: dict[str, Tensor | None] = {}
        for name, own in maps.items():
            rows = getattr(self, name)
            bias = getattr(self, f"{name}_bias")
            own = own.to(rows.device)
            changes[name] = (own @ rows.double()).to(rows.dtype)
            changes[f"{name}_bias"] = (
                None if bias is None else (own @ bias.double()[..., None])[..., 0].to(bias.dtype)
            )
        return replace(self, **changes)

    def expand(self, key_map: Sequence[int], value_map: Sequence[int]) -> LayerHeads:
        """One key and one value head a query head, by repeating: the lossless lift to MHA (DHA, App. D)."""
        keys = torch.as_tensor(key_map, device=self.k.device)
        values = torch.as_tensor(value_map, device=self.v.device)
        return self.changed(KEY_SIDE, lambda rows: rows[keys]).changed(
            VALUE_SIDE, lambda rows: rows[values]
        )

    def permute(self, order: Sequence[int]) -> LayerHeads:
        """Query heads (and the columns of o) in another order. Keys and values stay where they are."""
        index = torch.as_tensor(order, device=self.q.device)
        return self.changed(QUERY_SIDE, lambda rows: rows[index])

    def changed(self, names: Iterable[str], change: Callable[[Tensor], Tensor]) -> LayerHeads:
        """The tensors named, as far as they are there, each through `change`."""
        return replace(
            self,
            **{name: change(rows) for name in names if (rows := getattr(self, name)) is not None},
        )


def distinct(*parts: Tensor | None) -> tuple[list[int], Tensor]:
    """The first of each set of equal heads, and for every head the number of its set. `parts` `[H, ...]`.

    Where query heads share a head the lifted ones are equal: what is worked out of one holds for the others."""
    given = [part for part in parts if part is not None]
    first: list[int] = []
    which: list[int] = []
    for head in range(len(given[0])):
        same = (
            n
            for n, other in enumerate(first)
            if all(torch.equal(part[head], part[other]) for part in given)
        )
        which.append(next(same, len(first)))
        if which[-1] == len(first):
            first.append(head)
    return first, torch.tensor(which)
