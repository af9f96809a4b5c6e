"""Scores of whole partitions: the layer-output score and the full-model score.

Legend: H query heads, S sequences of T tokens, d head dim, D model dim.

A group's effect on the layer's output depends on its members alone, so it is computed once for each
group met, from the query heads of that group only; the groups met last are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention.families import family_of, window_of
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.modeling.rotary import apply_rotary, rotary_tables
from attention.modeling.scores import explicit_attention
from attention.plan import AttentionPlan
from search_spaces.partitions import Partition
from search_spaces.site import Site

CACHE_BYTES = 256 * 2**20
_TOGETHER = 64  # query heads worked on at once
_MEASURED = 1 << 16  # losses of whole models that are remembered
Norm = Callable[[Tensor], Tensor]


@dataclass
class LayerOutputScore:
    """Minus the relative squared error of one layer's attention output when heads are mean-pooled.

    0 is the original layer, -1 an error as large as the output. Partitions are over `units` (tuples
    of query heads). In memory are `inputs`, four times `[H, S, T, d]` and at most `cache_bytes` of
    cached groups (never fewer than those of one partition).

    Args:
        heads: Lifted heads of the layer.
        inputs: `[S, T, D]` float32.
        rotary: The tables (cos, sin), `[T, r]`.
        query_norm: Acts on `[..., d]` after the projection.
        key_norm: Acts on `[..., d]` after the projection.
        value_norm: The same of values.
        module: The stock attention, which knows the scale of the scores, a soft cap and a window.
        sides: What is pooled: keys, values or both.
    """

    heads: LayerHeads
    inputs: Tensor
    geometry: HeadGeometry
    sides: tuple[str, ...]
    units: tuple[tuple[int, ...], ...]
    rotary: tuple[Tensor, Tensor] | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    value_norm: Norm | None = None
    module: Any = None
    cache_bytes: int = CACHE_BYTES
    _effects: OrderedDict[tuple[int, ...], Tensor] = field(
        default_factory=OrderedDict[tuple[int, ...], Tensor]
    )

    @torch.no_grad()
    def __post_init__(self) -> None:
        self._q = self._rotated(self._project(self.heads.q, self.heads.q_bias), self.query_norm)
        # Keys and values are stored before norm and rotation: the mean of weights is the mean of
        # these, not of later values.
        self._k = self._project(self.heads.k, self.heads.k_bias)
        self._v = self._project(self.heads.v, self.heads.v_bias)
        everything = list(range(self.heads.num_heads))
        self._own = self._mixed(everything, self._rotated(self._k, self.key_norm), self._v)
        self._energy = float(self._output(everything, self._own).double().pow(2).sum())

    @classmethod
    def from_site(cls, site: Site, *, tokens: int = 2048, length: int = 512) -> LayerOutputScore:
        """Return the score of a site on at most `tokens` calibration tokens.

        Args:
            site: The site.
            tokens: Most tokens.
            length: The first so many tokens of each sequence are used.

        Raises:
            ValueError: Without stored inputs, without the model where rotary tables or norms are
                needed, and for norms that are not one for all heads.
        """
        inputs = site.need_statistics("objective=layer").inputs
        if not inputs.numel():
            raise ValueError(
                "objective=layer needs calibration inputs; calibrate with sample_tokens above 0"
            )
        length = min(length, tokens, inputs.shape[1])
        inputs = inputs[: max(1, tokens // length), :length].float()
        geometry = site.geometry
        if site.model is None and (geometry.rotary.dims or geometry.qk_norm):
            raise ValueError(
                "objective=layer needs the model for its rotary tables and norms; pass it in the "
                "context"
            )
        if site.heads.k_norm is not None:
            raise ValueError(
                f"objective=layer has no form for {geometry.family}, whose norm of queries and "
                f"keys has weights of "
                "each head's own; use another objective, such as least_squares or model"
            )
        rotary = norms = module = None
        value_norm: Norm | None = None
        if site.model is not None:
            rotary = rotary_tables(site.model, length, site.layer) if geometry.rotary.dims else None
            stock: Any = family_of(site.model.config).attention_modules(site.model)[site.layer]
            module = stock
            norms = _norms(stock) if geometry.qk_norm else None
            value_norm = stock.v_norm if geometry.value_norm else None
        query_norm, key_norm = norms or (None, None)
        return cls(
            site.heads,
            inputs,
            geometry,
            site.sides,
            site.units,
            rotary,
            query_norm,
            key_norm,
            value_norm,
            module,
        )

    def score(self, partition: Partition) -> float:
        """Minus the relative error. Only groups not met before are computed."""
        return self.scores([partition])[0]

    @torch.no_grad()
    def scores(self, partitions: Sequence[Partition]) -> list[float]:
        """Return the score of each partition (`score`).

        New groups are computed together, as many as may be remembered at a time.
        """
        values: list[float] = []
        for some in self._fitting(partitions):
            self._compute_missing(
                dict.fromkeys(group for partition in some for group in partition if len(group) > 1)
            )
            values += [self._sum(partition) for partition in some]
        return values

    @property
    def limit(self) -> int:
        """Groups that are remembered at most; a partition of more needs them all at once."""
        return max(self.cache_bytes // (self.inputs.numel() * self.inputs.element_size()), 1)

    def _fitting(self, partitions: Sequence[Partition]) -> Iterator[list[Partition]]:
        """Yield the runs of partitions whose groups together are within the limit."""
        some: list[Partition] = []
        groups: set[tuple[int, ...]] = set()
        for partition in partitions:
            more = {group for group in partition if len(group) > 1}
            if some and len(groups | more) > self.limit:
                yield some
                some = []
                groups = set()
            some.append(partition)
            groups |= more
        yield some

    def _sum(self, partition: Partition) -> float:
        change = torch.zeros_like(self.inputs)
        for group in partition:
            if len(group) > 1:
                change += self._effects[group]
        return -float(change.double().pow(2).sum()) / max(
            self._energy, torch.finfo(torch.float64).tiny
        )

    def _compute_missing(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Compute the effects of these groups, forgetting the oldest others to make room."""
        missing: list[tuple[int, ...]] = []
        count = len(self._effects)
        for group in groups:
            if group in self._effects:
                self._effects.move_to_end(group)
                count -= 1
            else:
                missing.append(group)
        for _ in range(min(count, max(len(self._effects) + len(missing) - self.limit, 0))):
            self._effects.popitem(last=False)
        for _, some in groupby(sorted(missing, key=len), len):
            alike = list(some)
            step = max(1, _TOGETHER // (len(alike[0]) * len(self.units[0])))
            for start in range(0, len(alike), step):
                batch = alike[start : start + step]
                self._effects.update(zip(batch, self._effects_of(batch), strict=True))

    def _effects_of(self, groups: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return what pooling each of these groups of one size adds to the output, `[S, T, D]`."""
        members = [[h for unit in group for h in self.units[unit]] for group in groups]
        size = len(members[0])
        flat = [h for group_members in members for h in group_members]

        def pooled(x_HSTd: Tensor) -> Tensor:
            x = torch.unflatten(x_HSTd[flat], 0, (-1, size))
            return x.mean(1, keepdim=True).expand_as(x).flatten(0, 1)

        k = pooled(self._k) if "key" in self.sides else self._k[flat]
        v = pooled(self._v) if "value" in self.sides else self._v[flat]
        mixed = self._mixed(flat, self._rotated(k, self.key_norm), v) - self._own[flat]
        return [
            self._output(group_members, group_scores)
            for group_members, group_scores in zip(members, torch.split(mixed, size), strict=True)
        ]

    @property
    def _window(self) -> int:
        """Tokens that the layer's sliding window keeps in view; 0 without one."""
        if self.module is None:
            return 0
        if hasattr(self.module, "sliding_window"):
            return self.module.sliding_window or 0
        return window_of(self.module.config)  # Mistral, Mixtral and Phi-3 read it as they compute

    def _mixed(self, members: list[int], k_gSTd: Tensor, v_gSTd: Tensor) -> Tensor:
        """Return what the query heads `members` read from these keys and values, `[g, S, T, d]`.

        The keys are rotated, the values have not passed their norm.
        """
        q_gSTd = self._q[members]
        v_gSTd = v_gSTd if self.value_norm is None else self.value_norm(v_gSTd)
        sinks = self.heads.sinks
        scaling = getattr(self.module, "scaling", None)
        softcap = getattr(self.module, "attn_logit_softcapping", None)
        window = self._window
        if sinks is None and softcap is None and not 0 < window < q_gSTd.shape[2]:
            return scaled_dot_product_attention(
                q_gSTd, k_gSTd, v_gSTd, is_causal=True, scale=scaling
            )
        visible = torch.ones(
            q_gSTd.shape[2], q_gSTd.shape[2], dtype=torch.bool, device=q_gSTd.device
        ).tril()
        visible = visible.triu(1 - window) if window else visible
        q, k, v = (x.transpose(0, 1) for x in (q_gSTd, k_gSTd, v_gSTd))
        group_sinks = None if sinks is None else sinks[members].float()
        return explicit_attention(
            q, k, v, visible, scaling, softcap=softcap, sinks=group_sinks
        ).transpose(0, 1)

    def _output(self, members: list[int], mixed_gSTd: Tensor) -> Tensor:
        """Return the part of `members` in the layer's output, `[S, T, D]`, without the output bias.

        No grouping changes that bias.
        """
        columns_DN = self.heads.o[members].float().permute(1, 0, 2).flatten(1)
        return mixed_gSTd.permute(1, 2, 0, 3).flatten(2) @ columns_DN.T

    def _project(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        result = torch.einsum("std,hed->hste", self.inputs, weight.float())
        return result if bias is None else result + bias.float()[:, None, None]

    def _rotated(self, x: Tensor, norm: Norm | None) -> Tensor:
        x = x if norm is None else norm(x)
        return x if self.rotary is None else apply_rotary(x, *self.rotary, self.geometry.rotary)


def _norms(module: Any) -> tuple[Norm, Norm]:
    names = ("q_norm", "k_norm") if hasattr(module, "q_norm") else ("q_layernorm", "k_layernorm")

    # Copies in float32, as what they get: LayerNorm on a GPU does not mix dtypes
    query, key = (deepcopy(getattr(module, name)).float() for name in names)
    return query, key


@dataclass
class ModelScore:
    """Minus the loss of the whole model (AsymGQA takes accuracy), each partition measured once.

    Silent: whether earlier layers are already grouped when a later one is searched. They are here:
    `plan_with` keeps what was found, as the paper's order "from the first layer to the last"
    suggests.
    """

    plan_with: Callable[[Partition], AttentionPlan]
    measure: Callable[[AttentionPlan], float]
    _known: dict[Partition, float] = field(default_factory=dict[Partition, float])

    def score(self, partition: Partition) -> float:
        if partition not in self._known:
            if len(self._known) >= _MEASURED:
                del self._known[next(iter(self._known))]
            self._known[partition] = -self.measure(self.plan_with(partition))
        return self._known[partition]

    def scores(self, partitions: Sequence[Partition]) -> list[float]:
        """Score one whole model after the other.

        They have nothing in common that could be computed once.
        """
        return [self.score(partition) for partition in partitions]
