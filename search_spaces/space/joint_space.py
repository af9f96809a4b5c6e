"""The joint space: every axis and every searched knob, read from their one declaration.

A point is decided field by field, in a fixed order, and a choice that would lead to an impossible
combination, or to the same plan twice, is never offered. Any sampler that can draw one plain
`Domain` at a time can drive it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

import numpy as np

from attention.axes import AUTO_KNOB, Knob
from attention.base.messages import did_you_mean
from attention.geometry import HeadGeometry
from search_spaces.planning.budgets import nearest_budget, require_budget
from search_spaces.planning.rank_counts import rank_refusal
from search_spaces.planning.widths import MOST_DIMS, most_width
from search_spaces.recipes.catalogue import AXES, BY, RECIPES, Recipe, RecipeError
from search_spaces.recipes.engine_form import EngineForm
from search_spaces.recipes.recipe import WIDEST
from search_spaces.recipes.rules import (
    broken_rules,
    keeps_everything,
    makes_equal_groups,
    refused_by_family,
)
from search_spaces.site import FUSION_DISTANCES
from search_spaces.space.domains import FIELD_ORDER, Domain, SpacePoint, by_field

OPTIONAL = ("objective", "similarity")
PROVIDED = ("statistics", "model")
ON_REQUEST = frozenset({FUSION_DISTANCES, "few_heads"})
"""Needs of parts that are proposed only if named: a search phase of training steps before any plan,
and few enough heads to score all partitions."""
# Only if `choices` names them: every trial would take longer, or be another model
NOT_UNASKED = {
    "refinement": "none",
    "relaxation": "none",
    "composition": "none",
    "recovery": "full",
    "width": 1,
}


@dataclass
class JointSpace:
    """All recipes and budgets that can be tried on one checkpoint.

    `choices` can include the parts that `NOT_UNASKED` excludes by default.

    `geometry` excludes those that a grouping cannot meet. `choices` restricts fields, e.g.
    `{"grouping": ["exact", "neighbour"]}`. `settings` fixes knobs ("axis.knob"), which are then not
    searched. A ratio that nothing in the space meets exactly is a ceiling, unless `strict`. Raises
    ValueError for an unknown field or choice, or if the space is empty.

    Attributes:
        kv_ratios: The budgets.
        provided: What parts may need ("statistics", "model", ...).
        engine: What is to hold the plans, exactly (None: Headfold itself).
    """

    kv_ratios: Sequence[float | Fraction]
    geometry: HeadGeometry | None = None
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    provided: Sequence[str] = PROVIDED
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    engine: EngineForm | None = None
    strict: bool = False
    _feasible: dict[tuple[Any, ...], bool] = field(
        default_factory=dict[tuple[Any, ...], bool], repr=False
    )
    _budgets: dict[tuple[Any, ...], str | None] = field(
        default_factory=dict[tuple[Any, ...], str | None], repr=False
    )
    _ceilings: set[float | Fraction] = field(default_factory=set[float | Fraction], repr=False)
    # Whether candidates that change nothing are proposed
    _whole_is_allowed: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        if not self.kv_ratios:
            raise ValueError("a space needs at least one kv_ratio, got none")
        wrong = [ratio for ratio in self.kv_ratios if not 0 < ratio <= 1]
        if wrong:
            raise ValueError(f"kv_ratio must lie in (0, 1], got {wrong[0]}")
        if self.engine is not None:
            self.settings = self.engine.settings() | dict(self.settings)
            self.geometry = self.geometry and self.engine.limited(self.geometry)
        self._options: dict[str, tuple[Any, ...]] = {
            "kv_ratio": tuple(self.kv_ratios),
            "together": (False, True),
            "by": BY,
            "width": (*range(1, 1 + max(self._most_width, 1)), WIDEST),
        }
        for name, axis in AXES.items():
            requested = self.choices.get(name, ())
            usable = tuple(
                p.name
                for p in axis
                if not (p.needs & set(PROVIDED)) - set(self.provided)
                and (not p.needs & ON_REQUEST or p.name in requested)
            )
            self._options[name] = ((None,) if name in OPTIONAL else ()) + usable
        for name, allowed in self.choices.items():
            if name not in self._options or name == "kv_ratio":
                fields = sorted(set(self._options) - {"kv_ratio"})
                raise ValueError(
                    f"choices are for the fields {fields}, got {name!r}{did_you_mean(name, fields)}"
                )
            if not allowed:
                raise ValueError(
                    f"{name}: expected at least one of {list(self._options[name])}, got an empty "
                    f"list"
                )
            unknown = [c for c in allowed if not _is_among(c, self._options[name])]
            if unknown:
                options = list(self._options[name])
                raise ValueError(
                    f"{name} must be among {options}, got {unknown[0]!r}"
                    f"{did_you_mean(unknown[0], options)}"
                )
            # "Not used" stays open: whether a field is used is decided by the fields before it.
            unused = (None,) if name in OPTIONAL else ()
            self._options[name] = tuple(dict.fromkeys((*unused, *allowed)))
        for name, plain in NOT_UNASKED.items():
            if name not in self.choices:
                self._options[name] = (plain,)
        self._check_settings()
        self._check_options()
        for ratio in () if self.strict else self.kv_ratios:
            if not self._can_finish({"kv_ratio": ratio}):
                self._ceilings.add(ratio)
        self._budgets.clear()
        self._feasible.clear()
        self._whole_is_allowed = False
        if not self._can_finish({}):  # where there are no others
            self._whole_is_allowed = True
            self._feasible.clear()
        if not self._can_finish({}):
            raise ValueError(
                f"nothing can be proposed for kv_ratios {[float(r) for r in self.kv_ratios]} and "
                f"choices "
                f"{dict(self.choices)}; {self._why_not()}"
            )

    @property
    def _most_width(self) -> int:
        """The largest width worth a try; without a geometry any that a checkpoint could have."""
        if self.geometry is None:
            return MOST_DIMS
        return min(self.geometry.num_kv_heads, most_width(self.geometry))

    # ---- deciding ------------------------------------------------------------------------------

    def next(self, point: Mapping[str, Any]) -> Domain | None:
        """Return the next decision after those in `point` (by name or field); None at the end."""
        full, pending = self._forced(by_field(point))
        if pending is not None:
            return self._domain(pending, self._allowed(full, pending))
        return next((d for d in self._knob_domains(full) if d.field not in full), None)

    def sample(self, generator: np.random.Generator) -> SpacePoint:
        """Return a random valid point, keyed by domain name."""
        point: SpacePoint = {}
        while (domain := self.next(point)) is not None:
            point[domain.name] = domain.sample(generator)
        return point

    def to_recipe(self, point: Mapping[str, Any]) -> tuple[Recipe, float]:
        """Return the recipe and the KV ratio of a complete point.

        Knobs may be left at their defaults.

        Raises:
            RecipeError: If a decision is missing or not allowed after those before it.
        """
        values = by_field(point)
        full, pending = self._forced(values)
        if pending is not None:
            raise RecipeError(
                f"the point {dict(point)} does not decide {pending}: {self._allowed(full, pending)}"
            )
        knobs = {name: value for name, value in full.items() if "." in name}
        fields = {name: full[name] for name in FIELD_ORDER if name != "kv_ratio"}
        recipe = Recipe(
            "joint", **fields, settings=tuple(sorted({**self._fixed(full), **knobs}.items()))
        )
        named = {candidate.digest: candidate for candidate in RECIPES.values()}
        return named.get(recipe.digest, recipe), float(full["kv_ratio"])

    # ---- inside --------------------------------------------------------------------------------

    def _forced(self, values: Mapping[str, Any]) -> tuple[SpacePoint, str | None]:
        """Return all decided fields, with those of one option, and the first open field, if any."""
        full: SpacePoint = {}
        for name in FIELD_ORDER:
            allowed = self._allowed(full, name)
            if name in values:
                if values[name] not in allowed:
                    reasons = (
                        "; ".join(self._broken({**full, name: values[name]}))
                        or "nothing valid can follow it"
                    )
                    raise RecipeError(
                        f"{name}={values[name]!r} is not possible after {full}: {reasons}"
                    )
                full[name] = values[name]
            elif len(allowed) == 1:
                full[name] = allowed[0]
            else:
                return full, name
        return {**full, **{k: v for k, v in values.items() if "." in k}}, None

    def _allowed(self, full: SpacePoint, name: str) -> list[Any]:
        return [
            option for option in self._options[name] if self._can_finish({**full, name: option})
        ]

    def _can_finish(self, full: SpacePoint) -> bool:
        """Whether some choice of the remaining fields makes a valid recipe."""
        key = tuple(full.get(name, ...) for name in FIELD_ORDER)
        if key not in self._feasible:
            if self._broken(full):
                self._feasible[key] = False
            else:
                name = next((name for name in FIELD_ORDER if name not in full), None)
                self._feasible[key] = name is None or any(
                    self._can_finish({**full, name: option}) for option in self._options[name]
                )
        return self._feasible[key]

    def _broken(self, full: SpacePoint) -> list[str]:
        """Why these choices cannot be; empty if they can."""
        record = {**full, "settings": self._fixed(full)}
        reasons = broken_rules(record) + _twice_the_same(full) + _too_dear(full)
        if self.geometry is not None:
            reasons += refused_by_family(record, self.geometry)
        if self.engine is not None:
            equal = "grouping" in full and makes_equal_groups(full["grouping"], self.settings)
            reasons += self.engine.refusals(full, equal_groups=equal)
        if not self._whole_is_allowed and {"sharing", "composition", "kv_ratio"} <= set(full):
            whole = keeps_everything(full["sharing"], full["composition"], full["kv_ratio"])
            reasons += [whole] if whole else []
        needed = {"kv_ratio", "grouping", "objective", "allocation", "width"}
        if not reasons and self.geometry is not None and needed <= set(full):
            reason = self._over_budget(full)
            reasons += [reason] if reason else []
        return reasons

    def _over_budget(self, full: SpacePoint) -> str | None:
        """Why the budget cannot be met.

        It looks at sharing, relaxation, fusion, grouping, allocation and width only.
        """
        assert self.geometry is not None
        names = (
            *("sharing", "relaxation", "fusion", "grouping", "objective", "similarity"),
            *("allocation", "width"),
        )
        key = (full["kv_ratio"], *(full.get(name) for name in names))
        if key not in self._budgets:
            partial = {name: full[name] for name in names if name in full}
            apart = "apart" in AXES["allocation"].get(full["allocation"]).needs
            try:
                recipe = Recipe(
                    "joint",
                    **partial,
                    together=not apart,
                    settings=tuple(self._fixed(partial).items()),
                )
                check = nearest_budget if full["kv_ratio"] in self._ceilings else require_budget
                check(recipe, full["kv_ratio"], self.geometry)
                self._budgets[key] = None
                if self.engine is not None and self.engine.ranks > 1:
                    self._budgets[key] = rank_refusal(
                        recipe, full["kv_ratio"], self.geometry, self.engine.ranks
                    )
            except ValueError as error:
                self._budgets[key] = str(error)
        return self._budgets[key]

    def _why_not(self) -> str:
        """Return the reason why the first budget fails with the plainest choices."""
        full: SpacePoint = {}
        for name in FIELD_ORDER:
            options = [o for o in self._options[name] if not self._broken({**full, name: o})]
            if not options:
                return (
                    "; ".join(self._broken({**full, name: self._options[name][0]}))
                    or f"{name} has no choice left"
                )
            full[name] = options[0]
        return "the choices exclude each other"

    def _fixed(self, full: SpacePoint) -> dict[str, Any]:
        """Return the fixed settings of the parts that are chosen."""
        return {k: v for k, v in sorted(self.settings.items()) if k in self._knobs(full)}

    def _knobs(self, full: SpacePoint) -> dict[str, Knob]:
        chosen = {name: full.get(name) for name in AXES}
        return {
            f"{name}.{knob.name}": knob
            for name, part in chosen.items()
            if part is not None
            for knob in AXES[name].get(part).knobs
        }

    def _knob_domains(self, full: SpacePoint) -> list[Domain]:
        domains: list[Domain] = []
        for name, knob in sorted(self._knobs(full).items()):
            if knob.searched and name not in self.settings:
                # Knobs of one name on different parts of an axis are different domains: their
                # ranges may differ.
                label = f"{name}:{full[name.partition('.')[0]]}"
                default = knob.default
                # Samplers draw numbers.
                if default == AUTO_KNOB and knob.low is not None and knob.high is not None:
                    default = math.sqrt(knob.low * knob.high)
                domains.append(
                    Domain(label, name, knob.kind, knob.low, knob.high, knob.choices, default)
                )
        return domains

    def _domain(self, name: str, allowed: Sequence[Any]) -> Domain:
        everything = [option for option in self._options[name] if option is not None]
        # Narrowed choices are a separate domain: samplers require the same choices under the same
        # name.
        label = (
            name if list(allowed) == everything else f"{name}:{'+'.join(str(a) for a in allowed)}"
        )
        kind = "bool" if name == "together" else "choice"
        return Domain(label, name, kind, choices=tuple(allowed), default=allowed[0])

    def _check_options(self) -> None:
        """Raise ValueError if no choice of a field is possible, whatever the others are."""
        for name, options in self._options.items():
            reasons = ["; ".join(self._broken({name: option})) for option in options]
            if reasons and all(reasons):
                raise ValueError(
                    f"nothing can be proposed for {name} in {list(options)}: {reasons[0]}"
                )

    def _check_settings(self) -> None:
        for name, value in self.settings.items():
            axis, _, knob = name.partition(".")
            owners = (
                [k for part in AXES[axis] for k in part.knobs if k.name == knob]
                if axis in AXES
                else []
            )
            if not owners:
                names = sorted(
                    {
                        f"{a.name}.{knob.name}"
                        for a in AXES.values()
                        for part in a
                        for knob in part.knobs
                    }
                )
                near = get_close_matches(str(name), names, n=3) or names
                raise ValueError(
                    f"settings: {str(name)[:100]!r} is no 'axis.knob'; there are e.g. "
                    f"{', '.join(near)}"
                )
            for owner in owners:
                try:
                    owner.check(value)
                except ValueError as error:
                    raise ValueError(f"settings: {axis}.{error}") from None


def _is_among(choice: Any, options: Sequence[Any]) -> bool:
    """Whether a choice is one of the options, and of its type: 1 is not True."""
    return any(type(choice) is type(option) and choice == option for option in options)


def _twice_the_same(full: SpacePoint) -> list[str]:
    """Choices that change nothing: only one of the equal points is offered."""
    if not {"grouping", "together"} <= set(full):
        return []
    searched = full["grouping"] != "neighbour"
    reasons: list[str] = []
    allocation = full.get("allocation")
    same = allocation is not None and "apart" not in AXES["allocation"].get(allocation).needs
    if not searched and full["together"] is False and same:
        reasons.append("neighbour grouping is the same for keys and values")
    if "by" in full and full["by"] != "both" and not (searched and full["together"]):
        reasons.append("by only matters if one searched grouping serves keys and values")
    return reasons


def _too_dear(full: SpacePoint) -> list[str]:
    """Refuse whole-model measurements for every move of a search and every point of every curve."""
    objective = full.get("objective")
    allocation = full.get("allocation")
    if objective is None or allocation is None:
        return []
    parts = AXES["objective"].get(objective), AXES["allocation"].get(allocation)
    if all("measure" in part.needs for part in parts):
        return [
            f"objective={objective} inside allocation={allocation} measures whole models within "
            f"whole models"
        ]
    return []
