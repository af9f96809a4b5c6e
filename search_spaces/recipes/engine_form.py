"""What an engine can store of a family without a larger cache, and which recipes suit it.

This module knows no engines: it passes a few plans to the export target
(`attention.io.targets.Target.support_for`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attention.geometry import HeadGeometry
from attention.io.targets import TargetError, target
from attention.plan import AttentionPlan, Composition, LayerPlan
from search_spaces.allocation.knapsack import usual_counts
from search_spaces.axes import ALLOCATION
from search_spaces.grouping.neighbour import neighbour_partition
from search_spaces.recipes.rules import EQUAL_SIZES_FIELD


@dataclass(frozen=True)
class EngineForm:
    """The kinds of plan that export target `target` stores without a larger cache.

    `grouped` layers at all, with groups of `unequal` size, different counts of KV heads per layer
    (`own_counts`: the usual ones, in groups as equal as possible), both of these together
    (`own_unequal`), keys and values with separate groups (`apart`), heads that are `composed`,
    heads of twice the checkpoint's width (`wide`, and `wide_own_counts` with different counts per
    layer). `ranks` are the GPUs that it divides the heads among.
    """

    target: str
    grouped: bool
    unequal: bool
    own_counts: bool
    own_unequal: bool
    apart: bool
    composed: bool
    wide: bool
    wide_own_counts: bool
    ranks: int = 1

    @classmethod
    def of(cls, name: str, config: Any, geometry: HeadGeometry) -> EngineForm:
        """Return the form that an engine's target holds of a checkpoint.

        Args:
            name: Of the target.
            config: Of the checkpoint.
            geometry: Of the checkpoint.

        Raises:
            ValueError: Naming the targets for one that is unknown.
        """
        stored = geometry.num_kv_heads
        layers = geometry.num_layers
        engine_target = target(name)

        def holds(
            keys: Sequence[Sequence[int]],
            values: Sequence[Sequence[int]] | None = None,
            width: int = 1,
            **more: Any,
        ) -> bool:
            """Whether stored head `u` of each layer may move to `keys[l][u]` and `values[l][u]`."""
            both = zip(keys, values or keys, strict=True)
            maps = [
                LayerPlan(
                    tuple(key_groups[u] for u in geometry.kv_map),
                    tuple(value_groups[u] for u in geometry.kv_map),
                    width,
                    width,
                )
                for key_groups, value_groups in both
            ]
            plan = AttentionPlan(
                tuple(maps), geometry.head_dim, other_layers=geometry.other_layers, **more
            )
            try:
                support = engine_target.support_for(config, plan)
            except TargetError:
                return False
            return support.bytes_per_token("float16") <= plan.kv_bytes_per_token("float16")

        # Uneven on purpose: all but the first group have one head
        groups = {
            count: [max(0, u - stored + count) for u in range(stored)]
            for count in range(1, stored + 1)
        }
        even = {
            count: _even_groups(stored, count) for count in usual_counts(stored, geometry.num_heads)
        }
        if not geometry.pads_queries:
            even = {count: groups for count, groups in even.items() if stored % count == 0}
        least = even[1]
        counts = even[stored]
        return cls(
            name,
            grouped=holds([least] * layers),
            unequal=all(holds([uneven] * layers) for uneven in groups.values()),
            own_counts=holds(list(even.values())),
            own_unequal=holds(list(groups.values())),
            apart=holds([least] * layers, [counts] * layers),
            composed=holds([least] * layers, composition=Composition()),
            wide=not geometry.qk_norm and holds([least] * layers, width=2),
            wide_own_counts=not geometry.qk_norm and holds(list(even.values()), width=2),
        )

    def refusals(self, record: Mapping[str, Any], *, equal_groups: bool) -> list[str]:
        """Return why the choices of `record` make plans that the engine does not represent.

        Args:
            record: Fields of a recipe, not all of them.
            equal_groups: Whether the grouping, if it is there, makes groups of one size.

        Returns:
            The reasons; empty if there are none.
        """
        name = f"target {self.target}"
        reasons: list[str] = []
        by_layer = (
            "by_layer" in ALLOCATION.get(record["allocation"]).needs
            if "allocation" in record
            else False
        )
        if record.get("composition", "none") != "none" and not self.composed:
            reasons.append(
                f"{name} composes no heads, so composition must be none, got "
                f"{record['composition']}"
            )
        if record.get("together", True) is False and not self.apart:
            reasons.append(
                f"{name} stores a key head with each value head, so together must be true, "
                "got false"
            )
        if by_layer and not self.own_counts:
            reasons.append(
                f"{name} holds as many KV heads in every layer of this family as in the widest, so "
                f"allocation must be "
                f"uniform, got {record['allocation']}"
            )
        if (
            "grouping" in record
            and not equal_groups
            and not (self.own_unequal if by_layer else self.unequal)
        ):
            where = "with a different count in each layer, " if by_layer and self.unequal else ""
            reasons.append(
                f"{name} holds no groups of unequal size {where}of this family, so "
                f"grouping.equal_sizes must be true "
                f"and grouping one that has it, got grouping={record['grouping']}"
            )
        if record.get("width", 1) != 1 and not (self.wide_own_counts if by_layer else self.wide):
            reasons.append(
                f"{name} holds no heads wider than the checkpoint's"
                f"{' with counts of each layer' * by_layer} of this family, so width must be 1, "
                f"got {record['width']}"
            )
        if not self.grouped and record.get("sharing") == "none":
            reasons.append(f"{name} holds no grouped heads of this family; choose another target")
        return reasons

    def limited(self, geometry: HeadGeometry) -> HeadGeometry:
        """Return the geometry without padded query heads if the target's groups need none."""
        return geometry if self.unequal else replace(geometry, pads_queries=False)

    def settings(self) -> dict[str, Any]:
        """Return the settings that a search among recipes is to keep to."""
        # Unequal groups would let a layer have counts that several GPUs cannot divide
        return {} if self.own_unequal and self.ranks == 1 else {EQUAL_SIZES_FIELD: True}


def _even_groups(stored: int, count: int) -> list[int]:
    """Return the group of each stored head: `count` groups of neighbours, as equal as can be."""
    return [g for g, members in enumerate(neighbour_partition(stored, count)) for _ in members]
