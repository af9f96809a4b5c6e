"""A plan: which key head and which value head each query head reads, in every layer.

A plan holds integers and names only; it is frozen, canonical, JSON, and has a digest. MHA, MQA,
GQA, uneven groups and different groups for keys and values are all one pair of maps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, TypeVar, cast

from attention.plan_parts import (
    Composition,
    HeadShare,
    LayerPlan,
    PlanError,
    resolve_shares,
    shortened,
)

_FORMAT = 1
# Fields of a plan.
SHARES = ("shares", "mlp_shares", "query_shares", "key_shares", "value_shares", "output_shares")
BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


def number_bytes(dtype: Any) -> int:
    """Return the bytes of a number.

    Args:
        dtype: A torch dtype or its name.

    Raises:
        ValueError: For an unknown one.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in BYTES:
        raise ValueError(f"dtype must be one of {sorted(BYTES)}, got {name!r}")
    return BYTES[name]


@dataclass(frozen=True)
class AttentionPlan:
    """The maps of all layers, the shared heads, and the composition. Invalid plans cannot be built.

    Attributes:
        layers: The maps of each layer.
        head_dim: d.
        shares: Heads that use the query, key and value weights of another.
        composition: How heads are composed, or None.
        mlp_shares: Shared blocks of the MLPs, each MLP split into as many blocks as a layer has
            query heads.
        query_shares: Shares of the query projection alone, where each projection has a separate
            match (Cao 2024's ablation); not together with `shares`.
        key_shares: The same of the key projection.
        value_shares: The same of the value projection.
        output_shares: Shares of the head's columns of the output projection, which `shares` leaves
            to the layer.
        other_layers: KV heads and head dim of each decoder layer with a cache that the plan does
            not change (`HeadGeometry.other_layers`).
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
    other_layers: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("a plan needs at least one layer, got none")
        if type(self.head_dim) is not int or self.head_dim < 1:
            raise PlanError(f"head_dim must be a positive integer, got {shortened(self.head_dim)}")
        for entry in self.other_layers:
            if len(entry) != 2 or not all(type(number) is int and number > 0 for number in entry):
                raise PlanError(
                    f"other_layers must be pairs of a number of KV heads and a head dim, got "
                    f"{shortened(entry)}"
                )
        heads = self.layers[0].num_heads
        for index, layer in enumerate(self.layers):
            if layer.num_heads != heads:
                raise PlanError(
                    f"layer {index}: key_map has {layer.num_heads} query heads, layer 0 has {heads}"
                )
        for name in SHARES:
            shares = getattr(self, name)
            for s in shares:
                if s.layer >= len(self.layers) or not (
                    0 <= s.head < heads and 0 <= s.source_head < heads
                ):
                    raise PlanError(
                        f"{name}: {s} is outside {len(self.layers)} layers of {heads} heads"
                    )
            if shares != resolve_shares(shares):
                raise PlanError(
                    f"{name} must be sorted and resolved to their roots; use resolve_shares()"
                )
        if self.shares and (self.query_shares or self.key_shares or self.value_shares):
            raise PlanError(
                "shares are of whole heads: with head_shares, query_shares, key_shares and "
                "value_shares must be empty"
            )
        for index in sorted({i for s in self.head_shares for i in (s.layer, s.source_layer)}):
            if not self.layers[index].is_identity:
                raise PlanError(
                    f"layer {index}: a shared head brings its own key and value, so the layers "
                    f"that share must keep "
                    f"all {heads} key and value heads, got key_map {self.layers[index].key_map} "
                    f"and value_map "
                    f"{self.layers[index].value_map}; group the heads or share them, not both"
                )
        if self.composition and self.is_wide:
            raise PlanError("composition: the heads must be as wide as the checkpoint's, got wider")
        if self.composition and heads % self.composition.groups:
            raise PlanError(
                f"composition: groups must divide the {heads} heads, got {self.composition.groups}"
            )

    @classmethod
    def identity(cls, num_layers: int, num_heads: int, head_dim: int) -> AttentionPlan:
        """Return the plan in which every query head has its own key and value head."""
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
        """Return the shares of one projection: "q", "k", "v" or "o"."""
        sources = {
            "q": self.query_shares,
            "k": self.key_shares,
            "v": self.value_shares,
            "o": self.output_shares,
        }[side]
        return sources if side == "o" else sources or self.shares

    @property
    def head_shares(self) -> frozenset[HeadShare]:
        """Every share of a head, whole or in part."""
        return frozenset(share for side in "qkvo" for share in self.shares_of(side))

    # ---- cost ----------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        return self.layers[0].num_heads

    @property
    def is_wide(self) -> bool:
        """Whether any layer has heads wider than those of the checkpoint."""
        return any(layer.is_wide for layer in self.layers)

    @property
    def kv_heads(self) -> int:
        """Kept key heads plus kept value heads, over all layers.

        A head counts as often as it is wide.
        """
        return sum(layer.key_slices + layer.value_slices for layer in self.layers)

    @property
    def kv_ratio(self) -> float:
        """Kept key and value heads over those of multi-head attention; 1 for MHA.

        The ratio that a user gives and reads is relative to the checkpoint's own cache instead:
        `attention.ratios.ratio_of`.
        """
        return self.kv_heads / (2 * self.num_layers * self.num_heads)

    def kv_bytes_per_token(self, dtype: Any = "bfloat16") -> int:
        """Return the bytes per token of the KV cache, with the key-side weights of composition.

        The layers that the plan does not change are included.

        Args:
            dtype: A torch dtype or its name.
        """
        size = number_bytes(dtype)
        composed = (
            self.num_layers * self.composition.cached_values(self.num_heads)
            if self.composition
            else 0
        )
        return (self.kv_heads * self.head_dim + composed + self.other_numbers) * size

    @property
    def other_numbers(self) -> int:
        """Numbers per token in the cache of the layers that the plan does not change."""
        return cached_numbers(self.other_layers)

    @property
    def is_uniform_gqa(self) -> bool:
        """Whether the plan, heads permuted, is plain GQA with one head count in all layers."""
        return (
            all(layer.is_uniform_gqa for layer in self.layers)
            and len({(layer.key_heads, layer.key_width) for layer in self.layers}) == 1
            and not self.is_shared
            and self.composition is None
        )

    # ---- JSON ----------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return canonical JSON: equal plans give equal strings."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `to_json` as plain values."""
        record = {
            "format": _FORMAT,
            "head_dim": self.head_dim,
            "layers": [layer_record(layer) for layer in self.layers],
            "shares": [],
            "composition": self.composition.to_dict() if self.composition else None,
        }
        # Empty fields except `shares` are left out, so that the digests of older plans do not
        # change
        others = [list(entry) for entry in self.other_layers]
        record |= {"other_layers": others} if others else {}
        return record | {
            n: [asdict(share) for share in shares] for n in SHARES if (shares := getattr(self, n))
        }

    @classmethod
    def from_json(cls, text: str) -> AttentionPlan:
        """Read a plan from the text that `to_json` returns.

        Raises:
            PlanError: Naming what is wrong.
        """
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"a plan must be JSON: {error}") from None
        return cls.from_dict(record)

    @classmethod
    def from_dict(cls, record: Any) -> AttentionPlan:
        """Read a plan from the values that `to_dict` returns.

        Raises:
            PlanError: Naming what is wrong.
        """
        values = _object(record)
        if values is None or values.get("format") != _FORMAT:
            form = type(record).__name__ if values is None else values.get("format")
            raise PlanError(
                f"a plan must be a JSON object with format {_FORMAT}, got {shortened(form)}"
            )
        fields_of_plan = {"format", "head_dim", "layers", "composition", "other_layers", *SHARES}
        unknown = sorted(set(values) - fields_of_plan)
        if unknown:
            raise PlanError(f"a plan has no field {unknown[0]!r}")
        missing = [name for name in ("layers", "head_dim") if name not in values]
        if missing:
            raise PlanError(f"a plan without {missing[0]} is incomplete")
        layers = tuple(
            layer_of_record(index, item) for index, item in enumerate(_listed(values, "layers"))
        )
        shares = {
            name: tuple(
                _built(HeadShare, item, f"{name} {index}")
                for index, item in enumerate(_listed(values, name))
            )
            for name in SHARES
        }
        composed = values.get("composition")
        composition = None if composed is None else _built(Composition, composed, "composition")
        others = tuple(
            tuple(cast(list[int], entry)) if isinstance(entry, list) else ()
            for entry in _listed(values, "other_layers")
        )
        return cls(
            layers,
            values["head_dim"],
            composition=composition,
            other_layers=cast(tuple[tuple[int, int], ...], others),
            **shares,
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, first 16 hex digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def cached_numbers(layers: Iterable[tuple[int, int]]) -> int:
    """Return the numbers per token in the cache of layers of so many KV heads and head dim each."""
    return sum(2 * heads * head_dim for heads, head_dim in layers)


def layer_record(layer: LayerPlan) -> dict[str, Any]:
    """Return the maps of a layer as plain values, and its widths where they are not 1."""
    record: dict[str, Any] = {"key_map": list(layer.key_map), "value_map": list(layer.value_map)}
    widths = {"key_width": layer.key_width, "value_width": layer.value_width}
    return record | {name: width for name, width in widths.items() if width != 1}


Built = TypeVar("Built", HeadShare, Composition)


def _object(value: Any) -> dict[str, Any] | None:
    """Return a JSON object as one; None for anything else."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def _listed(record: dict[str, Any], name: str) -> list[Any]:
    entries: Any = record.get(name, [])
    if not isinstance(entries, list):
        raise PlanError(f"{name} must be a list, got {shortened(entries)}")
    return cast(list[Any], entries)


def _built(kind: type[Built], item: Any, where: str) -> Built:
    """Return a dataclass from its record, which must have exactly its fields, with their types."""
    values = _object(item)
    if values is None:
        raise PlanError(f"{where} must be a JSON object, got {shortened(item)}")
    fields_of_kind = {field.name: field for field in fields(kind)}
    for name, value in values.items():
        if name not in fields_of_kind:
            raise PlanError(f"{where} has no field {name!r}; it has {sorted(fields_of_kind)}")
        if type(value).__name__ != fields_of_kind[name].type:
            raise PlanError(
                f"{where}: {name} must be of type {fields_of_kind[name].type}, got "
                f"{shortened(value)}"
            )
    missing = [
        name
        for name, field in fields_of_kind.items()
        if name not in values and field.default is MISSING
    ]
    if missing:
        raise PlanError(f"{where} needs {missing[0]}, got none")
    return kind(**values)


def layer_of_record(index: int, item: Any) -> LayerPlan:
    """Read the maps of layer `index` from the values of `layer_record`. Raises PlanError."""
    where = f"layers: layer {index}"
    values = _object(item)
    if values is None:
        raise PlanError(f"{where} must be a JSON object, got {shortened(item)}")
    if missing := sorted({"key_map", "value_map"} - set(values)):
        raise PlanError(f"{where} is incomplete: it has no {missing[0]}, got {shortened(item)}")
    if unknown := sorted(set(values) - {"key_map", "value_map", "key_width", "value_width"}):
        raise PlanError(f"{where} has no field {unknown[0]!r}")
    for name in ("key_map", "value_map"):
        if not isinstance(values[name], list):
            raise PlanError(
                f"{where}: {name} must be a list of integers, got {shortened(values[name])}"
            )
    try:
        return LayerPlan(
            tuple(values["key_map"]),
            tuple(values["value_map"]),
            values.get("key_width", 1),
            values.get("value_width", 1),
        )
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
