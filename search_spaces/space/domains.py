"""One decision of the joint space as plain data, and the condition under which it comes up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# Sharing first, as it leaves little else to choose; then relaxation, which leaves no fusion. Fusion before alignment
# and grouping before what it uses, so that the later choice is the one that gets narrowed.
ORDER = (
    "kv_ratio", "sharing", "relaxation", "fusion", "alignment", "grouping", "objective", "similarity", "allocation",
    "together", "by", "refinement", "composition", "recovery",
)  # fmt: skip
Condition = tuple[tuple[str, Any], ...]
Point = dict[str, Any]


@dataclass(frozen=True)
class Domain:
    """One decision, plain enough for any sampler.

    `name` is unique; `field` is what it decides ("grouping", "kv_ratio", "grouping.preserve", ...): one field has
    several domains where earlier choices narrow it. `kind`: "choice", "bool", "int", "float" or "log_float"; `low` and
    `high` are inclusive. `when`: the domain is decided if one of these conditions holds, a condition being
    field-value pairs that all hold (None: the field is not decided); `((),)` is always.
    """

    name: str
    field: str
    kind: str
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    default: Any = None
    when: tuple[Condition, ...] = ((),)

    def active(self, point: Mapping[str, Any]) -> bool:
        """Whether the domain is to be decided, given the decisions before it (by name or by field)."""
        known = by_field(point)
        return any(all(known.get(name) == value for name, value in condition) for condition in self.when)

    def sample(self, generator: np.random.Generator) -> Any:
        """A uniform draw (uniform in the logarithm for "log_float")."""
        if self.kind in ("choice", "bool"):
            options = self.choices or (False, True)
            return options[int(generator.integers(len(options)))]
        if self.low is None or self.high is None:
            raise ValueError(f"domain {self.name} is searched and needs low and high")
        if self.kind == "int":
            return int(generator.integers(int(self.low), int(self.high) + 1))
        if self.kind == "log_float":
            return float(np.exp(generator.uniform(np.log(self.low), np.log(self.high))))
        return float(generator.uniform(self.low, self.high))


def by_field(point: Mapping[str, Any]) -> Point:
    """A point keyed by field, from one keyed by domain name or by field."""
    return {name.partition(":")[0]: value for name, value in point.items()}


def with_condition(domain: Domain, stage: list[tuple[Point, str | None]]) -> Domain:
    """`domain` with the shortest condition (fields dropped one by one) that tells when it comes up."""
    yes = [before for before, name in stage if name == domain.name]
    no = [before for before, name in stage if name != domain.name]
    fields = [name for name in ORDER if any(name in before for before in (*yes, *no))]
    for name in list(fields):
        rest = [other for other in fields if other != name]
        if not _projected(yes, rest) & _projected(no, rest):
            fields = rest
    conditions = sorted(_projected(yes, fields), key=repr)
    return replace(domain, when=tuple(tuple(zip(fields, c, strict=True)) for c in conditions))


def _projected(points: list[Point], fields: Sequence[str]) -> set[tuple[Any, ...]]:
    return {tuple(point.get(name) for name in fields) for point in points}
