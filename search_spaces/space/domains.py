"""One decision of the joint space as plain data, and the order of the decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# Sharing first, as it leaves little else to choose; then relaxation, which leaves no fusion. Fusion
# before alignment and grouping before what it uses, so that the later choice is the one that gets
# narrowed.
FIELD_ORDER = (
    "kv_ratio", "sharing", "relaxation", "fusion", "alignment", "grouping", "objective",
    "similarity", "allocation", "width", "together", "by", "refinement", "composition", "recovery",
)  # fmt: skip
SpacePoint = dict[str, Any]


@dataclass(frozen=True)
class Domain:
    """One decision, plain enough for any sampler.

    `name` is unique; `field` is what it decides ("grouping", "kv_ratio", "grouping.preserve", ...):
    one field has several domains where earlier choices narrow it.

    Attributes:
        kind: "choice", "bool", "int", "float" or "log_float"; `low` and `high` are inclusive.
    """

    name: str
    field: str
    kind: str
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    default: Any = None

    def sample(self, generator: np.random.Generator) -> Any:
        """Return a uniform draw (uniform in the logarithm for "log_float")."""
        if self.kind in ("choice", "bool"):
            options = self.choices or (False, True)
            return options[int(generator.integers(len(options)))]
        if self.low is None or self.high is None:
            raise ValueError(f"domain {self.name} is searched and needs low and high")
        if self.kind == "int":
            return int(generator.integers(int(self.low), int(self.high) + 1))
        if self.kind == "log_float":
            low = float(np.log(self.low))
            high = float(np.log(self.high))
            return float(np.exp(generator.uniform(low, high)))
        return float(generator.uniform(self.low, self.high))


def by_field(point: Mapping[str, Any]) -> SpacePoint:
    """Return a point keyed by field, from one keyed by domain name or by field."""
    return {name.partition(":")[0]: value for name, value in point.items()}
