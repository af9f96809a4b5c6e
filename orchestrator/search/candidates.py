"""Candidates of a search: the joint space of recipes and KV ratios, and the learning rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NotRequired, TypedDict

import numpy as np

from attention.axes import AUTO_KNOB
from attention.base.messages import cut, did_you_mean
from attention.cache_formats import VLLM
from attention.checkpoint import Checkpoint
from attention.geometry import HeadGeometry
from attention.io.targets import EngineSupport, target
from attention.ratios import ROUNDING, ratio_of_kv_heads
from attention.tensor_parallel import RankLayoutError
from orchestrator.config.parsing import ConfigError
from orchestrator.config.schema import ArmSection, SearchConfig, SearchSection
from search_spaces.planning.budgets import check_budget, nearest_budget
from search_spaces.planning.rank_counts import rank_refusal
from search_spaces.recipes.catalogue import RECIPES, Recipe
from search_spaces.recipes.catalogue import recipe as named_recipe
from search_spaces.recipes.engine_form import EngineForm
from search_spaces.recipes.recipe import RECIPE_FIELDS
from search_spaces.recipes.rules import keeps_everything, refused_by_family
from search_spaces.recovery.tuning import AS_CONFIGURED
from search_spaces.site import FUSION_DISTANCES
from search_spaces.space.joint_space import Domain, JointSpace

Point = dict[str, Any]
DISTILLATION = "recovery.distillation"
"""The setting of a recipe that names its objective of training."""
OF_SEARCHER = "searcher."
"""Prefix of a searcher's own settings."""


class CandidateConfig(TypedDict):
    """The config of a trial of Tune, in the journal too: plain JSON values."""

    recipe: str
    kv_ratio: float
    learning_rate: float
    seed: int
    choices: Mapping[str, Any]
    """The recipe, in the form that `Recipe.from_dict` takes."""
    plan: NotRequired[str]
    probe: NotRequired[bool]
    used_kv_ratio: NotRequired[float]


@dataclass(frozen=True)
class Candidate:
    """A recipe at a KV ratio, trained with a learning rate.

    Attributes:
        recipe: How heads are shared.
        kv_ratio: The requested share of the checkpoint's KV cache.
        learning_rate: Of the training.
        seed: Of plan and training.
        plan: The plan to carry out, as JSON, where the searcher and not the recipe makes it.
        probe: Whether it is measured untrained and ends there; its plan need not meet the ratio
            yet.
        used: The share that is used where `kv_ratio`, a ceiling, cannot be met; None where it can.
    """

    recipe: Recipe
    kv_ratio: float
    learning_rate: float
    seed: int = 0
    plan: str | None = None
    probe: bool = False
    used: float | None = None

    @property
    def used_ratio(self) -> float:
        """The share of the checkpoint's KV heads that the plan uses, at most `kv_ratio`."""
        return self.kv_ratio if self.used is None else self.used

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for candidates that would give the same trial."""
        return (
            self.recipe.digest,
            self.kv_ratio,
            self.learning_rate,
            self.seed,
            self.plan,
            self.probe,
        )

    def config(self) -> CandidateConfig:
        """Return the config of its Tune trial, which is complete in itself."""
        config: CandidateConfig = {
            "recipe": self.recipe.name,
            "kv_ratio": self.kv_ratio,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
            "choices": self.recipe.to_dict(),
        }
        if self.plan is not None:
            config["plan"] = self.plan
            config["probe"] = self.probe
        if self.used is not None:
            config["used_kv_ratio"] = self.used
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Candidate:
        return cls(
            Recipe.from_dict(config["choices"]),
            config["kv_ratio"],
            config["learning_rate"],
            config["seed"],
            config.get("plan"),
            bool(config.get("probe", False)),
            config.get("used_kv_ratio"),
        )


@dataclass
class CandidateSpace:
    """A `JointSpace` with two more decisions: the learning rate and the objective of training.

    A point is decided one domain at a time.

    Attributes:
        joint: Of the recipe and the KV ratio.
        learning_rates: To draw from.
        seed: Of what is drawn.
        distillations: To draw from.
        distillation_weight: In the loss.
        arms: Names of the configured recipes, each with the digest of its recipe.
        several_seeds: Whether arms have more seeds than the one of what is drawn.
    """

    joint: JointSpace
    learning_rates: Sequence[float]
    seed: int = 0
    distillations: Sequence[str] = ()
    distillation_weight: float = 1.0
    arms: Mapping[str, str] = field(default_factory=dict)
    several_seeds: bool = False

    def next(self, point: Mapping[str, Any]) -> Domain | None:
        """Return the next decision, or None when the point is complete."""
        if (domain := self.joint.next(point)) is not None:
            return domain
        if len(self.learning_rates) > 1 and "learning_rate" not in point:
            return Domain(
                "learning_rate", "learning_rate", "choice", choices=tuple(self.learning_rates)
            )
        if len(self.distillations) > 1 and "distillation" not in point:
            return Domain("distillation", DISTILLATION, "choice", choices=tuple(self.distillations))
        return None

    def decide(self, choose: Callable[[Domain], Any]) -> Point:
        """Return a complete point: one decision after the other, as `choose` takes it."""
        point: Point = {}
        while (domain := self.next(point)) is not None:
            point[domain.name] = choose(domain)
        return point

    def sample(self, generator: np.random.Generator) -> Point:
        """Return a random valid point."""
        return self.decide(lambda domain: domain.sample(generator))

    def vary(self, point: Mapping[str, Any], changes: int, generator: np.random.Generator) -> Point:
        """Return a valid point near another.

        `changes` of its decisions are drawn anew, and so are those that no longer fit.
        """
        redrawn = set(generator.permutation(sorted(point))[:changes].tolist())

        def choose(domain: Domain) -> Any:
            unchanged = (
                domain.name in point
                and domain.name not in redrawn
                and _allows(domain, point[domain.name])
            )
            return point[domain.name] if unchanged else domain.sample(generator)

        return self.decide(choose)

    def candidate(self, point: Mapping[str, Any]) -> Candidate:
        """Return the candidate of a complete point.

        It has the name of its recipe in the catalogue, or else one by its digest. Trials of one
        name are compared as one arm: a drawn one may not have that of another recipe's arm, nor,
        with one seed, join a comparison over several.
        """
        recipe, kv_ratio = self.joint.to_recipe(point)
        unlike_arm = self.arms.get(recipe.name, recipe.digest) != recipe.digest
        if recipe.name not in RECIPES or unlike_arm or self.several_seeds:
            recipe = replace(recipe, name=f"joint-{recipe.digest[:6]}")
        used = (
            None
            if self.joint.geometry is None
            else used_ratio(recipe, kv_ratio, self.joint.geometry)
        )
        rate = float(point.get("learning_rate", self.learning_rates[0]))
        if self.distillations:
            objective = point.get("distillation", self.distillations[0])
            (recipe,) = with_objectives(recipe, [objective], self.distillation_weight)
        return Candidate(recipe, kv_ratio, rate, self.seed, used=used)

    def locate(self, candidate: Candidate) -> Point | None:
        """Return the point of a candidate, or None if it is outside the space."""
        fields: Mapping[str, Any] = {
            "kv_ratio": candidate.kv_ratio,
            "learning_rate": candidate.learning_rate,
            "width": candidate.recipe.width,  # which a recipe's record leaves out if it is 1
            **{k: v for k, v in candidate.recipe.to_dict().items() if k != "settings"},
            **dict(candidate.recipe.settings),
        }
        point: Point = {}
        while (domain := self.next(point)) is not None:
            value = fields.get(domain.field)
            if not _allows(domain, value):
                return None
            point[domain.name] = value
        return point if self.candidate(point).key == candidate.key else None


def _allows(domain: Domain, value: Any) -> bool:
    if domain.kind == "bool":
        return isinstance(value, bool) and value in (domain.choices or (False, True))
    if domain.kind == "choice":
        return value in domain.choices
    if value is None or value == AUTO_KNOB:  # a searcher draws numbers
        return False
    return (domain.low is None or value >= domain.low) and (
        domain.high is None or value <= domain.high
    )


def named_candidates(
    config: SearchConfig, geometry: HeadGeometry, engine: EngineForm | None = None
) -> tuple[Candidate, ...]:
    """Return every arm at its KV ratios with each of its learning rates and every seed.

    The baseline comes first, and at every ratio.

    Args:
        engine: What the engine of the search loads; None for any.

    Raises:
        ConfigError: For an unknown recipe, and for a ratio below all that a recipe can meet on
            this checkpoint, or, with `search.strict`, for a ratio that it cannot meet exactly.
    """
    of_search = ratios_of(config.search, geometry)
    arms = [
        (
            _recipe(config, arm),
            ratios_of(arm, geometry) or of_search,
            arm.learning_rates or config.learning_rates,
        )
        for arm in config.arms
    ]
    for recipe, _, _ in arms:
        _check_engine(recipe, engine)
        if reasons := refused_by_family(recipe.to_dict(), geometry):
            raise ConfigError(f"search.recipes: {recipe.name}: {'; '.join(reasons)}")
    arms.sort(key=lambda arm: arm[0].name != config.search.baseline)
    limited = geometry if engine is None else engine.limited(geometry)
    every = list(dict.fromkeys([*of_search, *(ratio for _, ratios, _ in arms for ratio in ratios)]))
    pairs = []
    for recipe, ratios, rates in arms:
        baseline = recipe.name == config.search.baseline
        strict, dtype = config.search.strict, config.model.dtype
        cannot = partial(
            _cannot_meet, recipe, geometry=limited, dtype=dtype, baseline=baseline, strict=strict
        )
        for ratio in every if baseline else ratios:
            if reason := cannot(ratio):
                shares = [
                    f"{k / geometry.num_kv_heads:g}" for k in range(1, geometry.num_kv_heads + 1)
                ]
                possible = [other for other in shares if cannot(float(other)) is None]
                raise ConfigError(
                    f"search.kv_ratios: got {ratio:g}, which recipe {recipe.name} cannot meet on "
                    f"this checkpoint ({reason}); it can meet {', '.join(possible) or 'none'} of "
                    "the checkpoint's own KV cache"
                )
            ranks = 1 if engine is None else engine.ranks
            if ranks > 1 and (reason := rank_refusal(recipe, ratio, limited, ranks)):
                raise ConfigError(f"search.tensor_parallel: {reason}")
            pairs.append((recipe, ratio, used_ratio(recipe, ratio, limited), rates))
    objectives = config.search.distillations
    weight = config.train.distillation_weight
    return tuple(
        Candidate(trained, ratio, rate, seed, used=used)
        for recipe, ratio, used, rates in pairs
        for rate in rates
        for trained in with_objectives(recipe, objectives, weight)
        for seed in config.seeds
    )


def search_phase_candidates(config: SearchConfig, named: Sequence[Candidate]) -> list[Candidate]:
    """Return a candidate for each of DHA's search phases that the trials need.

    Phases differ in steps, rate and seed. Where the search space has the objective, its trials
    share one.

    Args:
        config: The configuration.
        named: Its named candidates.
    """
    candidates = list(named)
    section = config.search
    if "fusion_loss" in section.search_space.get("objective", ()):
        knobs = ("objective.steps", "objective.rate")
        fixed = {name: value for name, value in section.params.items() if name in knobs}
        candidates.append(Candidate(named_recipe("dha", settings=fixed), 0.5, 1.0, config.seeds[0]))
    phases: dict[tuple[Any, ...], Candidate] = {}
    for candidate in candidates:
        if FUSION_DISTANCES in candidate.recipe.needs:
            knobs_of_phase = candidate.recipe.knobs("objective")
            phase = (knobs_of_phase["steps"], knobs_of_phase["rate"], candidate.seed)
            phases.setdefault(phase, candidate)
    return list(phases.values())


def with_objectives(recipe: Recipe, distillations: Sequence[str], weight: float) -> list[Recipe]:
    """Return a recipe with each objective of training; only itself if it sets its own.

    Args:
        recipe: The recipe, whose name stays.
        distillations: As in `train.distillation`; none: it is trained as configured.
        weight: Of a distillation in the loss.
    """
    if not distillations or dict(recipe.settings).get(DISTILLATION) != AS_CONFIGURED:
        return [recipe]
    return [
        recipe.with_changes(
            settings={DISTILLATION: objective, "recovery.distillation_weight": weight}
        )
        for objective in distillations
    ]


def used_ratio(recipe: Recipe, kv_ratio: float, geometry: HeadGeometry) -> float | None:
    """Return the share that a recipe uses instead of `kv_ratio`; None if that is met."""
    used = float(nearest_budget(recipe, kv_ratio, geometry))
    return None if abs(used - kv_ratio) <= ROUNDING / 2 else used


def ratios_of(section: SearchSection | ArmSection, geometry: HeadGeometry) -> list[float]:
    """Return the KV ratios of a search or an arm, as shares of the checkpoint's KV cache.

    Raises:
        ConfigError: For KV heads that are no share of it.
    """
    try:
        return section.kv_ratios or [
            ratio_of_kv_heads(heads, geometry) for heads in section.kv_heads
        ]
    except ValueError as error:
        where = (
            "search." if isinstance(section, SearchSection) else f"search.recipes: {section.name}: "
        )
        raise ConfigError(f"{where}kv_heads: {error}") from None


def _recipe(config: SearchConfig, arm: ArmSection) -> Recipe:
    """Return the recipe of an arm, called by its label. Raises ConfigError."""
    where = f"search.recipes: {arm.name}"
    if unknown := next((name for name in arm.changes if name not in RECIPE_FIELDS), None):
        wrong = f"{cut(repr(unknown))}{did_you_mean(unknown, RECIPE_FIELDS)}"
        raise ConfigError(
            f"{where}: changes: no axis {wrong}; there are {', '.join(RECIPE_FIELDS)}"
        )
    try:
        recipe = named_recipe(arm.recipe, **arm.changes, settings=arm.params)
    except ValueError as error:
        key = (
            "search.baseline"
            if arm.recipe not in {a.recipe for a in config.search.recipes}
            else where
        )
        raise ConfigError(f"{key}: {cut(str(error))}") from None
    _check_relaxation_steps(config, where, recipe.knobs("relaxation").get("steps", 0))
    return replace(recipe, name=arm.name)


def _check_relaxation_steps(config: SearchConfig, where: str, steps: Any) -> None:
    last = config.rungs.steps[-1]
    if isinstance(steps, int) and last and steps >= last:
        raise ConfigError(
            f"{where}: relaxation.steps must be below the last of rungs.steps, {last}, got {steps}"
        )


def engine_form(config: SearchConfig, model: Checkpoint) -> EngineForm | None:
    """Return what the engine of `search.target` loads of the model's family; None for `any`."""
    name, ranks = config.search.target, config.search.tensor_parallel
    if ranks > 1:
        _check_ranks(name, ranks, model.geometry)
    if name == "any":
        return None
    return replace(EngineForm.of(name, model.config, model.geometry), ranks=ranks)


def _check_ranks(name: str, ranks: int, geometry: HeadGeometry) -> None:
    """Raise ConfigError for a target or a checkpoint whose heads GPUs do not divide."""
    key = f"search.tensor_parallel: got {ranks}"
    if name == "any" or VLLM not in target(name).engines:
        which = "names no engine"
        if name != "any":
            which = f"is for {', '.join(target(name).engines)}, without such a division of heads"
        raise ConfigError(
            f"{key}, but search.target={name} {which}; set search.target=vllm (or gqa, phi, "
            "per_layer)"
        )
    try:
        EngineSupport.of_geometry(geometry).on_rank(ranks, geometry.num_heads)
    except RankLayoutError as error:
        raise ConfigError(f"{key}, and the checkpoint itself does not fit: {error}") from None


def _check_engine(recipe: Recipe, engine: EngineForm | None) -> None:
    """Raise ConfigError for a recipe of plans that the engine does not load at their own bytes."""
    if engine is None:
        return
    if reasons := _refused(recipe, engine):
        fits = [other.name for other in RECIPES.values() if not _refused(other, engine)]
        raise ConfigError(
            f"search.recipes: {recipe.name}: {'; '.join(reasons)}; set it in this arm's changes, "
            f"take another recipe ({', '.join(fits) or 'none fits'}), or set search.target=any and "
            "lower what is found (headfold export)"
        )


def _refused(recipe: Recipe, engine: EngineForm) -> list[str]:
    return engine.refusals(recipe.to_dict(), equal_groups=recipe.equal_groups)


def _cannot_meet(
    recipe: Recipe, ratio: float, geometry: HeadGeometry, dtype: str, baseline: bool, strict: bool
) -> str | None:
    """Return why a recipe cannot meet a ratio; None if it can.

    With the whole cache the baseline is the original model, trained for the same tokens.
    """
    if not baseline and (whole := keeps_everything(recipe.sharing, recipe.composition, ratio)):
        return whole
    try:
        if strict:
            check_budget(recipe, ratio, geometry, dtype)
        nearest_budget(recipe, ratio, geometry)
    except ValueError as error:
        return str(error)
    return None


def candidate_space(
    config: SearchConfig, geometry: HeadGeometry, engine: EngineForm | None = None
) -> CandidateSpace:
    """Return the space that free candidates are drawn from.

    Raises:
        ConfigError: For a field or choice that does not exist.
    """
    section, ratios = config.search, ratios_of(config.search, geometry)
    try:
        params = {
            name: value
            for name, value in section.params.items()
            if not name.startswith(OF_SEARCHER)
        }
        choices, strict = section.search_space, section.strict
        joint = JointSpace(
            ratios, geometry, choices=choices, settings=params, engine=engine, strict=strict
        )
    except ValueError as error:
        text = cut(str(error))
        wrong = text.removeprefix("settings: ")
        raise ConfigError(
            f"search.{'search_space' if wrong == text else 'params'}: {wrong}"
        ) from None
    if section.num_samples and any(c != "none" for c in choices.get("relaxation", ())):
        _check_relaxation_steps(config, "search.params", params.get("relaxation.steps", 0))
    return CandidateSpace(
        joint,
        config.learning_rates,
        config.seeds[0],
        section.distillations,
        config.train.distillation_weight,
        arms={arm.name: _recipe(config, arm).digest for arm in config.arms},
        several_seeds=len(config.seeds) > 1,
    )


def searcher_settings(config: SearchConfig) -> dict[str, Any]:
    """Return the settings of the searcher itself, without their prefix."""
    params = config.search.params
    return {
        name.removeprefix(OF_SEARCHER): value
        for name, value in params.items()
        if name.startswith(OF_SEARCHER)
    }
