"""A recipe: one choice on each axis and the settings of the chosen parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeGuard

from attention.axes import ALIGNMENT, FUSION, Axis, Part
from attention.base.messages import did_you_mean, one_of
from attention.conversion.refinement.refine import REFINEMENT
from search_spaces.axes import (
    ALLOCATION,
    COMPOSITION,
    GROUPING,
    OBJECTIVE,
    RECOVERY,
    RELAXATION,
    SHARING,
    SIMILARITY,
)
from search_spaces.recipes.rules import broken_rules, makes_equal_groups, used
from search_spaces.site import SIDES

AXES: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        *(GROUPING, OBJECTIVE, SIMILARITY, ALLOCATION, ALIGNMENT, FUSION, SHARING, REFINEMENT),
        *(COMPOSITION, RELAXATION, RECOVERY),
    )
}
BY = (*SIDES, "both")
WIDEST = "widest"
"""A width that each KV ratio decides: the largest of which the heads that it keeps are a
multiple."""
RECIPE_FIELDS = (*AXES, "together", "by", "width")
"""Fields that changes of a recipe may name."""


class RecipeError(ValueError):
    """A recipe that cannot be. The message names the field, the value and what is allowed."""


@dataclass(frozen=True)
class Recipe:
    """One point of the joint space, but for the KV ratio. Hashable.

    `objective` and `similarity` are None where the grouping does not use them. Raises RecipeError
    for what cannot be combined.

    Attributes:
        together: One grouping for keys and values, judged `by` the key side, the value side or both
            (ignored when apart).
        width: How many times as wide as the checkpoint's heads the KV heads are, that many fewer of
            them; or WIDEST.
        settings: Knob values by "axis.knob", completed with the defaults at construction.
    """

    name: str
    grouping: str = "neighbour"
    objective: str | None = None
    similarity: str | None = None
    allocation: str = "uniform"
    alignment: str = "none"
    fusion: str = "mean"
    sharing: str = "none"
    refinement: str = "none"
    composition: str = "none"
    relaxation: str = "none"
    recovery: str = "full"
    together: bool = True
    by: str = "both"
    width: int | str = 1
    settings: tuple[tuple[str, Any], ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        settings = dict(self.settings)
        if self.by not in BY:
            raise RecipeError(f"recipe {self.name}: {one_of('by', BY, self.by)}")
        if type(self.together) is not bool:  # JSON may contain any type
            raise RecipeError(
                f"recipe {self.name}: together must be true or false, got {self.together!r}"
            )
        if self.width != WIDEST and (type(self.width) is not int or self.width < 1):
            raise RecipeError(
                f"recipe {self.name}: width must be a whole number of head dims, at least 1, or "
                f"{WIDEST!r}, got {self.width!r}"
            )
        full: dict[str, Any] = {}
        try:
            parts = self.parts()
            for axis, part in parts.items():
                allowed = {
                    k.removeprefix(f"{axis}."): v
                    for k, v in settings.items()
                    if k.startswith(f"{axis}.")
                }
                full |= {f"{axis}.{knob}": value for knob, value in part.settings(allowed).items()}
        except ValueError as error:
            raise RecipeError(f"recipe {self.name}: {error}") from None
        unknown = sorted(set(settings) - set(full))
        if unknown:
            raise RecipeError(
                f"recipe {self.name}: setting {unknown[0]!r} belongs to no chosen "
                f"part{did_you_mean(unknown[0], full)}; "
                f"there are {sorted(full) or 'none'}"
            )
        object.__setattr__(self, "settings", tuple(sorted(full.items())))
        for reason in broken_rules(vars(self)):
            raise RecipeError(f"recipe {self.name}: {reason}")

    def parts(self) -> dict[str, Part]:
        """Return the chosen part of each axis that is in use, in the order of `AXES`."""
        chosen = {name: getattr(self, name) for name in AXES}
        return {name: AXES[name].get(part) for name, part in chosen.items() if part is not None}

    def knobs(self, axis: str) -> dict[str, Any]:
        """Return the settings of the part on `axis`, defaults included."""
        return {k.removeprefix(f"{axis}."): v for k, v in self.settings if k.startswith(f"{axis}.")}

    def apply(self, axis: str, *arguments: Any) -> Any:
        """Return what the part on `axis` makes of these arguments, with its settings."""
        return AXES[axis].get(getattr(self, axis))(*arguments, **self.knobs(axis))

    @property
    def needs(self) -> frozenset[str]:
        """The needs of the parts: of "statistics", "model", "sequences" and internal marks."""
        return frozenset(need for part in self.parts().values() for need in part.needs)

    @property
    def measures_increases(self) -> bool:
        """Whether its allocation rests on the loss increases of single layers."""
        return "measure" in AXES["allocation"].get(self.allocation).needs

    @property
    def reads_text(self) -> bool:
        """Whether a part looks at calibration tokens."""
        return bool(self.needs & {"statistics", "sequences", "model"})

    @property
    def equal_groups(self) -> bool:
        """True if the grouping only makes groups of one size.

        Its knob says so, or the part can do no other.
        """
        return makes_equal_groups(self.grouping, dict(self.settings))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the same for equal recipes.

        A width of 1 is left out, so that older recipes keep their digests.
        """
        record = {**asdict(self), "settings": dict(self.settings)}
        if self.width == 1:
            del record["width"]
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Recipe:
        """Inverse of `to_dict`. Raises RecipeError for an unknown field or a bad value."""
        names = {field.name for field in fields(cls)}
        unknown = sorted(set(record) - names)
        if unknown or "name" not in record:
            raise RecipeError(
                f"a recipe has the fields {sorted(names)} and needs a name, got {sorted(record)}"
            )
        settings = _settings_of(record["name"], record)
        values: dict[str, Any] = {**record, "settings": tuple(sorted(settings.items()))}
        return cls(**values)

    @property
    def digest(self) -> str:
        """SHA-256 of all but name and source, first 16 hex digits.

        Equal choices have equal digests.
        """
        record = {k: v for k, v in self.to_dict().items() if k not in ("name", "source")}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def conversion_choices(self) -> dict[str, Any]:
        """The fields that a converted model depends on: all but names, relaxation and recovery."""
        excluded = ("name", "source", "relaxation", "recovery")
        choices = {key: value for key, value in self.to_dict().items() if key not in excluded}
        settings = {k: v for k, v in self.settings if k.split(".")[0] not in excluded}
        return choices | {"settings": settings}

    def with_changes(self, **changes: Any) -> Recipe:
        """Return this recipe with other choices.

        `settings` (or "axis.knob" keys) are merged; settings of parts that are no longer chosen
        fall away; what the new grouping does not use is set to None.

        Raises:
            RecipeError: For unknown fields or settings, and for choices that exclude each other.
        """
        dotted = {key: changes.pop(key) for key in list(changes) if "." in key}
        unknown = sorted(set(changes) - {*RECIPE_FIELDS, "settings"})
        if unknown:
            raise RecipeError(
                f"recipe {self.name}: no field {unknown[0]!r}"
                f"{did_you_mean(unknown[0], RECIPE_FIELDS)}; there "
                f"are {list(RECIPE_FIELDS)}, and "
                "settings like grouping.iterations"
            )
        new = {**_settings_of(self.name, changes), **dotted}
        changes.pop("settings", None)
        replaced = {
            axis for axis in AXES if axis in changes and changes[axis] != getattr(self, axis)
        }
        old = {k: v for k, v in self.settings if k.split(".")[0] not in replaced}
        chosen = {
            name: changes.get(name, getattr(self, name))
            for name in ("grouping", "objective", "similarity")
        }
        for name in ("objective", "similarity"):
            if name not in changes and not used(name, chosen):
                chosen[name] = changes[name] = None
                old = {k: v for k, v in old.items() if not k.startswith(f"{name}.")}
        return replace(self, **changes, settings=tuple(sorted({**old, **new}.items())))


def _settings_of(name: Any, record: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = record.get("settings", {})
    if not _is_mapping(settings):
        raise RecipeError(
            f"recipe {name}: settings must map 'axis.knob' to values, got {settings!r}"
        )
    return settings


def _is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)
