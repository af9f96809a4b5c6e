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
    """Weights of the heads of one layer.

    Attributes:
        q: `[H, d, D]`, rows of the query projection.
        k: `[G^K, d, D]`, rows of the key projection.
        v: `[G^V, d, D]`, rows of the value projection; d may be another than that of the keys.
        o: `[H, D, d]`, the columns of the output projection that read head h; d as in `v`.
        q_bias: `[H, d]` or None.
        k_bias: `[G^K, d]` or None.
        v_bias: `[G^V, d]` or None.
        o_bias: `[D]` or None.
        q_norm: `[H, d]`, weights of a norm after the projection that each head has for itself, or
            None.
        k_norm: `[G^K, d]`, the same of the keys.
        sinks: `[H]`, a logit of each query head that takes attention weight and brings no value, or
            None.
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
        """Apply `Tensor.to` to every tensor."""
        return replace(
            self,
            **{
                f.name: t.to(*args, **kwargs)
                for f in fields(self)
                if (t := getattr(self, f.name)) is not None
            },
        )

    def mapped(self, **maps: Tensor) -> LayerHeads:
        """Multiply the heads of the named projections (q, k, v) by maps `[heads, d, d]`.

        Biases are mapped, too. Products are computed in float64.
        """
        changes: dict[str, Tensor | None] = {}
        for name, head_map in maps.items():
            rows = getattr(self, name)
            bias = getattr(self, f"{name}_bias")
            head_map = head_map.to(rows.device)
            changes[name] = (head_map @ rows.double()).to(rows.dtype)
            changes[f"{name}_bias"] = (
                None
                if bias is None
                else (head_map @ bias.double()[..., None])[..., 0].to(bias.dtype)
            )
        return replace(self, **changes)

    def expand(self, key_map: Sequence[int], value_map: Sequence[int]) -> LayerHeads:
        """Repeat key and value heads so that each query head has its own.

        This is the lossless lift to multi-head attention (DHA, App. D).
        """
        keys = torch.as_tensor(key_map, device=self.k.device)
        values = torch.as_tensor(value_map, device=self.v.device)
        return self.changed(KEY_SIDE, lambda rows: rows[keys]).changed(
            VALUE_SIDE, lambda rows: rows[values]
        )

    def permute(self, order: Sequence[int]) -> LayerHeads:
        """Return the query heads (and the columns of o) in another order.

        Keys and values stay in place.
        """
        index = torch.as_tensor(order, device=self.q.device)
        return self.changed(QUERY_SIDE, lambda rows: rows[index])

    def changed(self, names: Iterable[str], change: Callable[[Tensor], Tensor]) -> LayerHeads:
        """Return the heads with `change` applied to each of the named tensors that is not None."""
        return replace(
            self,
            **{name: change(rows) for name in names if (rows := getattr(self, name)) is not None},
        )


def distinct_heads(*parts: Tensor | None) -> tuple[list[int], Tensor]:
    """Find sets of equal heads.

    Query heads that share a head are equal after lifting: results for one are valid for the others.

    Args:
        parts: Tensors `[H, ...]`; heads are equal if they are in all of them.

    Returns:
        The first head of each set, and for every head the number of its set.
    """
    tensors = [part for part in parts if part is not None]
    first: list[int] = []
    which: list[int] = []
    for head in range(len(tensors[0])):
        same = (
            n
            for n, other in enumerate(first)
            if all(torch.equal(part[head], part[other]) for part in tensors)
        )
        which.append(next(same, len(first)))
        if which[-1] == len(first):
            first.append(head)
    return first, torch.tensor(which)


def group_means(rows: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Return the mean of each group's rows in float64, `[H, ...]` -> `[G, ...]`.

    A group of one comes back bit by bit.
    """
    return torch.stack([rows[list(group)].double().mean(0) for group in groups]).to(rows.dtype)
