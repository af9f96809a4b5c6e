"""What a searcher chooses among: the joint space of recipes and budgets, and the learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attention.geometry import HeadGeometry
from orchestrator.config import ConfigError, SearchConfig
from search_spaces.planning import check_budget
from search_spaces.recipes import RECIPES, Recipe
from search_spaces.recipes import recipe as named_recipe
from search_spaces.space import Domain, JointSpace

Point = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """One thing to try: a recipe at a budget, trained with a learning rate."""

    recipe: Recipe
    kv_ratio: float
    learning_rate: float

    @property
    def key(self) -> tuple[str, float, float]:
        """Equal for candidates that would give the same trial."""
        return (self.recipe.digest, self.kv_ratio, self.learning_rate)

    def config(self) -> dict[str, Any]:
        """What a Tune trial is handed: plain JSON values, complete in themselves."""
        return {
            "recipe": self.recipe.name,
            "kv_ratio": self.kv_ratio,
            "learning_rate": self.learning_rate,
            "choices": self.recipe.to_dict(),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Candidate:
        return cls(Recipe.from_dict(config["choices"]), float(config["kv_ratio"]), float(config["learning_rate"]))


@dataclass
class CandidateSpace:
    """`JointSpace` with one more decision, the learning rate; a point is decided one domain at a time."""

    joint: JointSpace
    learning_rates: Sequence[float]

    def next(self, point: Mapping[str, Any]) -> Domain | None:
        """The next decision, or None when the point is complete."""
        if (domain := self.joint.next(_joint(point))) is not None:
            return domain
        if len(self.learning_rates) > 1 and "learning_rate" not in point:
            return Domain("learning_rate", "learning_rate", "choice", choices=tuple(self.learning_rates))
        return None

    def sample(self, generator: np.random.Generator) -> Point:
        """A random valid point."""
        point: Point = {}
        while (domain := self.next(point)) is not None:
            point[domain.name] = domain.sample(generator)
        return point

    def candidate(self, point: Mapping[str, Any]) -> Candidate:
        """The candidate of a complete point. A recipe without a name is called by its digest."""
        recipe, kv_ratio = self.joint.to_recipe(_joint(point))
        if recipe.name not in RECIPES:
            recipe = replace(recipe, name=f"joint-{recipe.digest[:6]}")
        return Candidate(recipe, kv_ratio, float(point.get("learning_rate", self.learning_rates[0])))

    def locate(self, candidate: Candidate) -> Point | None:
        """The point of a candidate, or None if it lies outside of the space (its choices are restricted)."""
        fields = {"kv_ratio": candidate.kv_ratio, "learning_rate": candidate.learning_rate}
        fields |= {k: v for k, v in candidate.recipe.to_dict().items() if k != "settings"}
        fields |= dict(candidate.recipe.settings)
        point: Point = {}
        while (domain := self.next(point)) is not None:
            value = fields.get(domain.field)
            if not _allows(domain, value):
                return None
            point[domain.name] = value
        return point if self.candidate(point).key == candidate.key else None


def _joint(point: Mapping[str, Any]) -> Point:
    return {name: value for name, value in point.items() if name != "learning_rate"}


def _allows(domain: Domain, value: Any) -> bool:
    if domain.kind == "bool":
        return isinstance(value, bool) and value in (domain.choices or (False, True))
    if domain.kind == "choice":
        return value in domain.choices
    if value is None:
        return False
    return (domain.low is None or value >= domain.low) and (domain.high is None or value <= domain.high)


def named_candidates(config: SearchConfig, geometry: HeadGeometry) -> tuple[Candidate, ...]:
    """Every configured recipe at every budget with every learning rate, the baseline first.

    Raises ConfigError for an unknown recipe, and for a budget that a recipe cannot meet on this checkpoint.
    """
    recipes = []
    for name in config.recipes:
        key = "search.recipes" if name in config.search.recipes else "search.baseline"
        try:
            recipes.append(named_recipe(name))
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
    recipes.sort(key=lambda recipe: recipe.name != config.search.baseline)
    for budget in config.search.budgets:
        for recipe in recipes:
            if reason := _cannot_meet(recipe, budget, geometry):
                known = [f"{k / geometry.num_heads:g}" for k in range(1, geometry.num_heads + 1)]
                possible = [ratio for ratio in known if _cannot_meet(recipe, float(ratio), geometry) is None]
                raise ConfigError(
                    f"search.budgets: got {budget:g}, which recipe {recipe.name} cannot meet on this checkpoint "
                    f"({reason}); it can meet {', '.join(possible) or 'none'}"
                )
    rates = config.learning_rates
    return tuple(Candidate(r, b, lr) for r in recipes for b in config.search.budgets for lr in rates)


def _cannot_meet(recipe: Recipe, budget: float, geometry: HeadGeometry) -> str | None:
    try:
        check_budget(recipe, budget, geometry)
    except ValueError as error:
        return str(error)
    return None


def candidate_space(config: SearchConfig, geometry: HeadGeometry) -> CandidateSpace:
    """The space that free candidates are drawn from. Raises ConfigError for a field or choice that does not exist."""
    section = config.search
    try:
        joint = JointSpace(section.budgets, geometry, choices=section.choices, settings=section.settings)
    except ValueError as error:
        raise ConfigError(f"search.choices: {error}") from None
    return CandidateSpace(joint, config.learning_rates)
