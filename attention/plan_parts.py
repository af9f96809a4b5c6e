"""The parts of a plan: the maps of a layer, shared heads, and the composition of heads.

Legend: H query heads per layer, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


class PlanError(ValueError):
    """An invalid plan. The message names layer, map and value."""


def dense(ids: Iterable[int]) -> tuple[int, ...]:
    """Renumber ids from 0 in order of first appearance: (7, 2, 7) -> (0, 1, 0)."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(i, len(numbers)) for i in ids)


def groups_of(head_map: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the members of each kept head, ascending: (0, 1, 0) -> ((0, 2), (1,))."""
    members: list[list[int]] = [[] for _ in range(max(head_map, default=-1) + 1)]
    for head, group in enumerate(head_map):
        members[group].append(head)
    return tuple(tuple(m) for m in members)


def map_of(groups: Iterable[Iterable[int]], num_heads: int) -> tuple[int, ...]:
    """Return the dense map of a partition of range(num_heads).

    Raises:
        PlanError: If it is not a partition.
    """
    owner: dict[int, int] = {}
    for index, group in enumerate(groups):
        for head in group:
            if head in owner or not 0 <= head < num_heads:
                raise PlanError(
                    f"groups must cover heads 0..{num_heads - 1} once each; head {head} is wrong"
                )
            owner[head] = index
    missing = [h for h in range(num_heads) if h not in owner]
    if missing:
        raise PlanError(
            f"groups must cover heads 0..{num_heads - 1} once each; head {missing[0]} is in none"
        )
    return dense(owner[h] for h in range(num_heads))


@dataclass(frozen=True)
class LayerPlan:
    """The maps of one layer, and the widths of its key and value heads.

    Attributes:
        key_map: For each query head the key head that it reads; ids are dense from 0.
        value_map: For each query head the value head that it reads.
        key_width: How many times as wide as the checkpoint's heads the key heads are. A head of
            width m is cached as m neighbouring slices of the head dim.
        value_width: The same of the value heads.
    """

    key_map: tuple[int, ...]
    value_map: tuple[int, ...]
    key_width: int = 1
    value_width: int = 1

    def __post_init__(self) -> None:
        for name in ("key_width", "value_width"):
            width = getattr(self, name)
            if type(width) is not int or width < 1:
                raise PlanError(
                    f"{name} must be a whole number of head dims, at least 1, got "
                    f"{shortened(width)}"
                )
        for name in ("key_map", "value_map"):
            ids = getattr(self, name)
            if not isinstance(ids, tuple) or not all(type(i) is int for i in ids):
                raise PlanError(f"{name} must be a tuple of integers, got {shortened(ids)}")
            if not ids:
                raise PlanError(f"{name} must name a kept head for at least one query head, got ()")
            if ids != dense(ids):
                raise PlanError(
                    f"{name} must be dense from 0 in order of first appearance, got "
                    f"{shortened(ids)}; use dense()"
                )
        if len(self.key_map) != len(self.value_map):
            raise PlanError(
                f"key_map and value_map must have one entry a query head, got {len(self.key_map)} "
                f"and "
                f"{len(self.value_map)}"
            )

    @classmethod
    def identity(cls, num_heads: int) -> LayerPlan:
        """Return the maps in which every head keeps its own key and value (MHA)."""
        return cls(tuple(range(num_heads)), tuple(range(num_heads)))

    @classmethod
    def from_groups(
        cls,
        key_groups: Iterable[Iterable[int]],
        value_groups: Iterable[Iterable[int]],
        num_heads: int,
        widths: tuple[int, int] = (1, 1),
    ) -> LayerPlan:
        """Return the maps of a partition of the query heads for keys and one for values."""
        return cls(map_of(key_groups, num_heads), map_of(value_groups, num_heads), *widths)

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
    def widths(self) -> tuple[int, int]:
        """Widths of key and value heads, in head dims."""
        return self.key_width, self.value_width

    @property
    def is_wide(self) -> bool:
        """Whether key or value heads are wider than those of the checkpoint."""
        return self.widths != (1, 1)

    @property
    def key_slices(self) -> int:
        """Key heads times their width: head dims that are cached per token."""
        return self.key_heads * self.key_width

    @property
    def value_slices(self) -> int:
        """Value heads times their width: head dims that are cached per token."""
        return self.value_heads * self.value_width

    @property
    def is_identity(self) -> bool:
        return self.key_heads == self.value_heads == self.num_heads and not self.is_wide

    @property
    def is_uniform_gqa(self) -> bool:
        """Return one map for keys and values, with groups of equal size.

        Plain GQA once the query heads are permuted, of heads as wide as the plan says.
        """
        alike = self.key_map == self.value_map and self.key_width == self.value_width
        return alike and len({len(g) for g in self.key_groups}) == 1


@dataclass(frozen=True, order=True)
class HeadShare:
    """A head uses the weights of head `source_head` of the earlier layer `source_layer` (Cao 2024).

    They are its Q, K and V weights; in `AttentionPlan.mlp_shares` the neurons, in and out, of a
    block of the MLP.
    """

    layer: int
    head: int
    source_layer: int
    source_head: int

    def __post_init__(self) -> None:
        if not 0 <= self.source_layer < self.layer:
            raise PlanError(
                f"share of layer {self.layer} head {self.head}: the source must lie in an earlier "
                f"layer, "
                f"got layer {self.source_layer}"
            )


def resolve_shares(shares: Iterable[HeadShare]) -> tuple[HeadShare, ...]:
    """Follow chains of shares, whose source is itself shared, to their roots; return them sorted.

    Raises:
        PlanError: If a head is shared twice.
    """
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
    """Settings of dynamically composable heads (Xiao 2024, sections 3 and 4.6).

    Attributes:
        rank: R of the low-rank branch, of each group.
        query_side: Whether there is a branch made from the query token.
        key_side: Whether there is a branch made from the key token.
        before_softmax: Whether heads are composed before the softmax, with separate parameters.
        after_softmax: Whether they are composed after it.
        static_base: A learned H x H matrix instead of the skip; with both sides off this is
        Talking-Heads attention.
        groups: Heads are composed within this many groups of neighbouring query heads (section
        3.2).
        window: 0 for none; else in local layers per token sees itself and the `window - 1` before
            it.
        The window masks attention; the cache keeps all tokens.
        window_pattern: p local layers to every global one (1, 3, 7 in Table 10), the second layer
        of every p + 1 being global (**silent**).
        qk_norm: Queries and keys are divided by their root mean square over the head dim, each
        query head with one learned scale; which norm is **silent** in the paper, this one
        commutes with RoPE.
        projection: The low-rank branches (Table 9, "dyn. proj.").
        gate: The gates (Table 9, "dyn. gate").
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
            raise PlanError(
                "composition: at least one of projection and gate must be on where a side is"
            )
        if not (self.query_side or self.key_side or self.static_base):
            raise PlanError(
                "composition: at least one of query_side, key_side, static_base must be on"
            )
        if not (self.before_softmax or self.after_softmax):
            raise PlanError(
                "composition: at least one of before_softmax and after_softmax must be on"
            )
        if self.groups < 1 or self.window < 0 or self.window_pattern < 1:
            raise PlanError(
                f"composition: groups and window_pattern must be at least 1 and window at least 0, "
                f"got "
                f"{self.groups}, {self.window_pattern}, {self.window}"
            )

    def window_of(self, layer: int) -> int:
        """Return the window of a layer, 0 if it sees everything."""
        return 0 if layer % (self.window_pattern + 1) == 1 else self.window

    @property
    def width(self) -> int:
        """Weights that one side of one place has for a query head.

        2R of the projection and 1 of the gate.
        """
        return 2 * self.rank * self.projection + self.gate

    def cached_values(self, num_heads: int) -> int:
        """Return the number of key-side weights per token in a layer's cache.

        They are 2R + 1 per query head for each of the two compositions (Xiao 2024, sec. 4.4).
        """
        modules = self.before_softmax + self.after_softmax
        return modules * num_heads * self.width if self.key_side else 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values.

        Fields added later are left out at their default, so that digests do not change.
        """
        record = asdict(self)
        return {k: v for k, v in record.items() if k not in ("projection", "gate") or not v}


def shortened(value: Any) -> str:
    """Return a value as an error message shows it."""
    return repr(value)[:200]
