"""What a plan is: which key head and which value head each query head reads, in every layer.

Legend: L layers, H query heads a layer, G^K / G^V kept key / value heads of a layer, d head dim.

A plan holds integers and names only; it is frozen, canonical, JSON, and has a digest. Tensors live in safetensors
beside it. MHA, MQA, GQA, uneven groups and different groups for keys and values are all one pair of maps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from fractions import Fraction
from typing import Any, TypeVar

FORMAT = 1
SHARES = ("shares", "mlp_shares", "query_shares", "key_shares", "value_shares", "output_shares")  # fields of a plan
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}


class PlanError(ValueError):
    """A plan that cannot be. The message names layer, map and value."""


def dense(ids: Iterable[int]) -> tuple[int, ...]:
    """Renumber ids from 0 in order of first appearance: (7, 2, 7) -> (0, 1, 0)."""
    seen: dict[int, int] = {}
    return tuple(seen.setdefault(i, len(seen)) for i in ids)


def groups_of(head_map: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Members of each kept head, ascending: (0, 1, 0) -> ((0, 2), (1,))."""
    members: list[list[int]] = [[] for _ in range(max(head_map, default=-1) + 1)]
    for head, kept in enumerate(head_map):
        members[kept].append(head)
    return tuple(tuple(m) for m in members)


def map_of(groups: Iterable[Iterable[int]], num_heads: int) -> tuple[int, ...]:
    """The dense map of a partition of range(num_heads). Raises PlanError if it is not a partition."""
    owner: dict[int, int] = {}
    for index, group in enumerate(groups):
        for head in group:
            if head in owner or not 0 <= head < num_heads:
                raise PlanError(f"groups must cover heads 0..{num_heads - 1} once each; head {head} is wrong")
            owner[head] = index
    missing = [h for h in range(num_heads) if h not in owner]
    if missing:
        raise PlanError(f"groups must cover heads 0..{num_heads - 1} once each; head {missing[0]} is in none")
    return dense(owner[h] for h in range(num_heads))


@dataclass(frozen=True)
class LayerPlan:
    """`key_map[h]`, `value_map[h]`: the kept key head and value head that query head h reads. Ids are dense from 0."""

    key_map: tuple[int, ...]
    value_map: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("key_map", "value_map"):
            ids = getattr(self, name)
            if not isinstance(ids, tuple) or not all(type(i) is int for i in ids):
                raise PlanError(f"{name} must be a tuple of integers, got {_short(ids)}")
            if not ids:
                raise PlanError(f"{name} must name a kept head for at least one query head, got ()")
            if ids != dense(ids):
                raise PlanError(
                    f"{name} must be dense from 0 in order of first appearance, got {_short(ids)}; use dense()"
                )
        if len(self.key_map) != len(self.value_map):
            raise PlanError(
                f"key_map and value_map must have one entry a query head, got {len(self.key_map)} and "
                f"{len(self.value_map)}"
            )

    @classmethod
    def identity(cls, num_heads: int) -> LayerPlan:
        """Every head keeps its own key and value (MHA)."""
        return cls(tuple(range(num_heads)), tuple(range(num_heads)))

    @classmethod
    def from_groups(
        cls, key_groups: Iterable[Iterable[int]], value_groups: Iterable[Iterable[int]], num_heads: int
    ) -> LayerPlan:
        return cls(map_of(key_groups, num_heads), map_of(value_groups, num_heads))

    @property
    def num_heads(self) -> int:
        return len(self.key_map)

    @property
    def key_heads(self) -> int:
        return max(self.key_map) + 1

    @property
    def value_heads(self) -> int:
        return max(self.value_map) + 1

    @property
    def key_groups(self) -> tuple[tuple[int, ...], ...]:
        return groups_of(self.key_map)

    @property
    def value_groups(self) -> tuple[tuple[int, ...], ...]:
        return groups_of(self.value_map)

    @property
    def is_identity(self) -> bool:
        return self.key_heads == self.value_heads == self.num_heads

    @property
    def is_uniform_gqa(self) -> bool:
        """One map for keys and values, groups of equal size: plain GQA once the query heads are permuted."""
        return self.key_map == self.value_map and len({len(g) for g in self.key_groups}) == 1


@dataclass(frozen=True, order=True)
class HeadShare:
    """Head `head` of layer `layer` uses the Q, K, V weights of head `source_head` of an earlier layer (paper 004).

    In `AttentionPlan.mlp_shares` the same of MLP blocks: their neurons, in and out, are those of the earlier block.
    """

    layer: int
    head: int
    source_layer: int
    source_head: int

    def __post_init__(self) -> None:
        if not 0 <= self.source_layer < self.layer:
            raise PlanError(
                f"share of layer {self.layer} head {self.head}: the source must lie in an earlier layer, "
                f"got layer {self.source_layer}"
            )


def resolve_shares(shares: Iterable[HeadShare]) -> tuple[HeadShare, ...]:
    """Follow chains (the source is itself shared) to their roots; sorted. Raises PlanError on a head shared twice."""
    source: dict[tuple[int, int], tuple[int, int]] = {}
    for s in shares:
        if (s.layer, s.head) in source:
            raise PlanError(f"share of layer {s.layer} head {s.head}: it has two sources")
        source[s.layer, s.head] = (s.source_layer, s.source_head)
    resolved = []
    for (layer, head), root in source.items():
        while root in source:
            root = source[root]
        resolved.append(HeadShare(layer, head, *root))
    return tuple(sorted(resolved))


@dataclass(frozen=True)
class Composition:
    """Settings of dynamically composable heads (paper 002, sections 3 and 4.6).

    `rank`: R of the low-rank branch, of each group. `query_side`, `key_side`: the branches made from the query token
    and from the key token. `before_softmax`, `after_softmax`: where heads are composed, each place with its own
    parameters. `static_base`: a learned H x H matrix in place of the skip; with both sides off this is Talking-Heads
    attention. `projection`, `gate`: the low-rank branches and the gates, of whichever sides are on (Table 9: "dyn.
    proj." and "dyn. gate"). `groups`: heads are composed within this many groups of neighbouring query heads (section
    3.2).
    `qk_norm`: queries and keys are divided by their root mean square over the head dim, each query head with one
    learned scale. **Silent** in the paper is which norm; this one commutes with RoPE, so its place does not matter.

    `window`: 0 for none; else in local layers a token sees itself and the `window - 1` before it. `window_pattern` p:
    p local layers to every global one (1, 3, 7 in the paper's Table 10). **Silent** is the phase: here the second
    layer of every p + 1 is global. The window masks attention; the cache keeps all tokens.
    """

    rank: int = 2
    query_side: bool = True
    key_side: bool = True
    before_softmax: bool = True
    after_softmax: bool = True
    static_base: bool = False
    groups: int = 1
    window: int = 0
    window_pattern: int = 1
    qk_norm: bool = False
    projection: bool = True
    gate: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise PlanError(f"composition: rank must be at least 1, got {self.rank}")
        if (self.query_side or self.key_side) and not (self.projection or self.gate):
            raise PlanError("composition: at least one of projection and gate must be on where a side is")
        if not (self.query_side or self.key_side or self.static_base):
            raise PlanError("composition: at least one of query_side, key_side, static_base must be on")
        if not (self.before_softmax or self.after_softmax):
            raise PlanError("composition: at least one of before_softmax and after_softmax must be on")
        if self.groups < 1 or self.window < 0 or self.window_pattern < 1:
            raise PlanError(
                f"composition: groups and window_pattern must be at least 1 and window at least 0, got "
                f"{self.groups}, {self.window_pattern}, {self.window}"
            )

    def window_of(self, layer: int) -> int:
        """The window of a layer, 0 if it sees everything."""
        return 0 if layer % (self.window_pattern + 1) == 1 else self.window

    @property
    def width(self) -> int:
        """Weights that one side of one place has for a query head: 2R of the projection and 1 of the gate."""
        return 2 * self.rank * self.projection + self.gate

    def cached_values(self, num_heads: int) -> int:
        """Key-side weights of a token in a layer's cache: 2R + 1 a query head at each place (paper 002, sec. 4.4)."""
        places = self.before_softmax + self.after_softmax
        return places * num_heads * self.width if self.key_side else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what came later is left out where it is on, so that earlier plans keep their digests."""
        record = asdict(self)
        return {k: v for k, v in record.items() if k not in ("projection", "gate") or not v}


@dataclass(frozen=True)
class AttentionPlan:
    """The maps of all layers, the shared heads, and the composition. An invalid plan cannot be constructed.

    `shares`: heads that use the query, key and value weights of another. `query_shares`, `key_shares`, `value_shares`:
    the same of one projection alone, where each follows a match of its own (paper 004's ablation); not beside `shares`.
    `output_shares`: the head's columns of the output projection, which `shares` leaves to the layer.
    `mlp_shares`: shared blocks of the MLPs, each MLP split into as many blocks as a layer has query heads.
    """

    layers: tuple[LayerPlan, ...]
    head_dim: int
    shares: tuple[HeadShare, ...] = ()
    composition: Composition | None = None
    mlp_shares: tuple[HeadShare, ...] = ()
    query_shares: tuple[HeadShare, ...] = ()
    key_shares: tuple[HeadShare, ...] = ()
    value_shares: tuple[HeadShare, ...] = ()
    output_shares: tuple[HeadShare, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("a plan needs at least one layer, got none")
        if type(self.head_dim) is not int or self.head_dim < 1:
            raise PlanError(f"head_dim must be a positive integer, got {_short(self.head_dim)}")
        heads = self.layers[0].num_heads
        for index, layer in enumerate(self.layers):
            if layer.num_heads != heads:
                raise PlanError(f"layer {index}: key_map has {layer.num_heads} query heads, layer 0 has {heads}")
        for name in SHARES:
            shares = getattr(self, name)
            for s in shares:
                if s.layer >= len(self.layers) or not (0 <= s.head < heads and 0 <= s.source_head < heads):
                    raise PlanError(f"{name}: {s} lies outside {len(self.layers)} layers of {heads} heads")
            if shares != resolve_shares(shares):
                raise PlanError(f"{name} must be sorted and resolved to their roots; use resolve_shares()")
        if self.shares and (self.query_shares or self.key_shares or self.value_shares):
            raise PlanError("shares are of whole heads: query_shares, key_shares and value_shares must be empty beside")
        for index in sorted({i for s in self.head_shares for i in (s.layer, s.source_layer)}):
            if not self.layers[index].is_identity:
                raise PlanError(
                    f"layer {index}: a shared head brings its own key and value, so the layers that share must keep "
                    f"all {heads} key and value heads, got key_map {self.layers[index].key_map} and value_map "
                    f"{self.layers[index].value_map}; group the heads or share them, not both"
                )
        if self.composition and heads % self.composition.groups:
            raise PlanError(f"composition: groups must divide the {heads} heads, got {self.composition.groups}")

    @classmethod
    def identity(cls, num_layers: int, num_heads: int, head_dim: int) -> AttentionPlan:
        return cls(tuple(LayerPlan.identity(num_heads) for _ in range(num_layers)), head_dim)

    @property
    def is_shared(self) -> bool:
        """True if some weights serve several layers."""
        return any(getattr(self, name) for name in SHARES)

    @property
    def unshared(self) -> AttentionPlan:
        """The plan with every layer owning its weights."""
        return replace(self, **dict.fromkeys(SHARES, ()))

    def shares_of(self, side: str) -> tuple[HeadShare, ...]:
        """The shares of one projection: "q", "k", "v" or "o"."""
        own = {"q": self.query_shares, "k": self.key_shares, "v": self.value_shares, "o": self.output_shares}[side]
        return own if side == "o" else own or self.shares

    @property
    def head_shares(self) -> frozenset[HeadShare]:
        """Every share of a head, whole or in part."""
        return frozenset(share for side in "qkvo" for share in self.shares_of(side))

    # ---- cost -------------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        return self.layers[0].num_heads

    @property
    def kv_heads(self) -> int:
        """Kept key heads plus kept value heads, over all layers."""
        return sum(layer.key_heads + layer.value_heads for layer in self.layers)

    @property
    def kv_fraction(self) -> Fraction:
        """`kv_ratio` without rounding."""
        return Fraction(self.kv_heads, 2 * self.num_layers * self.num_heads)

    @property
    def kv_ratio(self) -> float:
        """Kept key and value heads over those of multi-head attention, which a plan alone knows of; 1 for MHA.

        What a user gives and reads is relative to the checkpoint's own cache: `attention.ratios.ratio_of`.
        """
        return float(self.kv_fraction)

    def kv_bytes_per_token(self, dtype: Any = "bfloat16") -> int:
        """Bytes that one token occupies in the KV cache. `dtype` is a torch dtype or its name.

        With composition the key-side weights, cached beside the keys and values, are included (`kv_ratio` counts
        heads only).
        """
        name = str(dtype).removeprefix("torch.")
        if name not in BYTES:
            raise ValueError(f"dtype must be one of {sorted(BYTES)}, got {name!r}")
        composed = self.num_layers * self.composition.cached_values(self.num_heads) if self.composition else 0
        return (self.kv_heads * self.head_dim + composed) * BYTES[name]

    @property
    def is_uniform_gqa(self) -> bool:
        """True if, after permuting heads, the plan is plain GQA with one head count in all layers."""
        return (
            all(layer.is_uniform_gqa for layer in self.layers)
            and len({layer.key_heads for layer in self.layers}) == 1
            and not self.is_shared
            and self.composition is None
        )

    # ---- JSON -------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Canonical JSON: equal plans give equal strings."""
        record = {
            "format": FORMAT,
            "head_dim": self.head_dim,
            "layers": [asdict(layer) for layer in self.layers],
            "shares": [asdict(share) for share in self.shares],
            "composition": self.composition.to_dict() if self.composition else None,
        }
        for name in SHARES[1:]:  # left out when empty, so that plans from before keep their digests
            if shares := getattr(self, name):
                record[name] = [asdict(share) for share in shares]
        return json.dumps(record, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> AttentionPlan:
        """Inverse of `to_json`. Raises PlanError naming what is wrong."""
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"a plan must be JSON: {error}") from None
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            found = record.get("format") if isinstance(record, dict) else type(record).__name__
            raise PlanError(f"a plan must be a JSON object with format {FORMAT}, got {_short(found)}")
        unknown = sorted(set(record) - {"format", "head_dim", "layers", "composition", *SHARES})
        if unknown:
            raise PlanError(f"a plan has no field {unknown[0]!r}")
        missing = [name for name in ("layers", "head_dim") if name not in record]
        if missing:
            raise PlanError(f"a plan without {missing[0]} is incomplete")
        layers = tuple(_layer(index, item) for index, item in enumerate(_listed(record, "layers")))
        shares = {
            name: tuple(_built(HeadShare, item, f"{name} {index}") for index, item in enumerate(_listed(record, name)))
            for name in SHARES
        }
        composed = record.get("composition")
        composition = None if composed is None else _built(Composition, composed, "composition")
        return cls(layers, record["head_dim"], composition=composition, **shares)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, first 16 hex digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


Built = TypeVar("Built", HeadShare, Composition)


def _listed(record: dict[str, Any], name: str) -> list[Any]:
    found = record.get(name, [])
    if not isinstance(found, list):
        raise PlanError(f"{name} must be a list, got {_short(found)}")
    return found


def _built(kind: type[Built], item: Any, where: str) -> Built:
    """A dataclass from its record: every field there, of its own type, and no other."""
    if not isinstance(item, dict):
        raise PlanError(f"{where} must be a JSON object, got {_short(item)}")
    known = {field.name: field for field in fields(kind)}
    for name, value in item.items():
        if name not in known:
            raise PlanError(f"{where} has no field {name!r}; it has {sorted(known)}")
        if type(value).__name__ != known[name].type:
            raise PlanError(f"{where}: {name} must be of type {known[name].type}, got {_short(value)}")
    missing = [name for name, field in known.items() if name not in item and field.default is MISSING]
    if missing:
        raise PlanError(f"{where} needs {missing[0]}, got none")
    return kind(**item)


def _layer(index: int, item: Any) -> LayerPlan:
    where = f"layers: layer {index}"
    if not isinstance(item, dict):
        raise PlanError(f"{where} must be a JSON object, got {_short(item)}")
    if missing := sorted({"key_map", "value_map"} - set(item)):
        raise PlanError(f"{where} is incomplete: it has no {missing[0]}, got {_short(item)}")
    if unknown := sorted(set(item) - {"key_map", "value_map"}):
        raise PlanError(f"{where} has no field {unknown[0]!r}")
    for name in ("key_map", "value_map"):
        if not isinstance(item[name], list):
            raise PlanError(f"{where}: {name} must be a list of integers, got {_short(item[name])}")
    try:
        return LayerPlan(tuple(item["key_map"]), tuple(item["value_map"]))
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None


def _short(value: Any) -> str:
    return repr(value)[:200]
