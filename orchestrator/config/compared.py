"""A configuration that compares papers' methods on a user's checkpoint, each at its best.

It is a grid: every arm at the same KV ratios and steps, with its own learning rates and the same
seeds, and no trial is stopped early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attention.base.messages import one_of
from orchestrator.config.first import BILLION, COMES_ALONG, FirstConfig
from orchestrator.config.parsing import ConfigError
from search_spaces.recipes.catalogue import NAMED_RECIPES, NamedRecipe, Recipe, RecipeError

SEEDS = (0, 1, 2)
BASELINE = "gqa"
_NAMED = {named.recipe.name: named for named in NAMED_RECIPES}
_RATES = (
    (30_000_000, (3.0e-4, 1.0e-3), (1.0e-4, 3.0e-4)),
    (BILLION, (1.0e-4, 3.0e-4), (3.0e-5, 1.0e-4)),
)
"""Up to so many parameters: the rates of arms whose conversion is not refined, and of those whose
is. The latter begin near the original's loss, and rates that repair an average harm them."""
_RATES_OF_LARGE = (3.0e-5, 1.0e-4), (1.0e-5, 3.0e-5)


def compared_recipes(text: str) -> tuple[str, ...]:
    """Return the names of `--compare`, without the baseline, which is always there.

    Args:
        text: Names of recipes with commas between them.

    Raises:
        ConfigError: For an unknown recipe, one that is named twice, and none.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _NAMED:
            raise ConfigError(f"--compare: {one_of('recipe', sorted(_NAMED), name)}")
        if names.count(name) > 1:
            raise ConfigError(f"--compare: {name} is named twice; give each recipe once")
    others = tuple(name for name in names if name != BASELINE)
    if not others:
        raise ConfigError(
            f"--compare: {BASELINE} is the baseline of every comparison; name recipes that are to "
            "be compared with it, e.g. asymgqa,dha,align"
        )
    return others


def refined(named: NamedRecipe) -> Recipe | None:
    """Return a paper's conversion followed by our local fit, instead of a relaxation.

    None where the conversion cannot be refined, and for our own recipes.
    """
    if not named.papers:
        return None
    try:
        return named.recipe.with_changes(relaxation="none", refinement="fit_heal")
    except RecipeError:
        return None


@dataclass(frozen=True)
class ComparisonConfig(FirstConfig):
    """The choices of a comparison.

    Attributes:
        recipes: Those that are compared with the baseline.
    """

    recipes: tuple[str, ...] = ()

    about = "a comparison of methods"
    about_baseline = "runs at every KV ratio"
    stopping = "stop: false    # every trial runs to the end"

    @property
    def ending(self) -> str:
        return f"-compared{super().ending}"

    @property
    def steps(self) -> tuple[list[int], int]:
        """Rungs whose last leaves relaxations the steps to come to their end; no promotion."""
        if self.smoke:
            return [0, 10], 0
        return ([0, 40, 120] if self.source in COMES_ALONG else [0, 200, 800]), 0

    def candidates(self) -> str:
        names = (BASELINE, *self.recipes)
        if relaxing := [name for name in names if _NAMED[name].recipe.relaxation != "none"]:
            self._check_relaxations(relaxing)
        plain, fitted = self._rates()
        arms = [self._arm(_NAMED[name], fitted) for name in names]
        arms += [
            self._refined_arm(_NAMED[name].recipe, changed, fitted)
            for name in names
            if (changed := refined(_NAMED[name])) is not None
        ]
        seeds = SEEDS[:1] if self.smoke else SEEDS
        lines = [
            "searcher: grid    # every arm at every KV ratio, with each of its rates and each seed",
            self.kv_ratios,
            "# Each arm is judged at its best rate: give more where that is the lowest or highest",
            f"learning_rates: {plain}",
            f"seeds: {list(seeds)}    # of plans, masks and the order of the data",
            "recipes:",
            *(f"  - {arm}" for arm in arms),
        ]
        return "\n".join(f"  {line}" for line in lines)

    def promotion(self) -> str:
        return "  enabled: false    # methods are compared, no model is shipped\n"

    def _rates(self) -> tuple[str, str]:
        """Return the rates of plain and of refined arms, as lists in YAML."""
        pairs = next((pair for most, *pair in _RATES if self.parameters < most), _RATES_OF_LARGE)
        plain, fitted = (rates[:1] if self.smoke else rates for rates in pairs)
        return _listed(plain), _listed(fitted)

    def _arm(self, named: NamedRecipe, fitted: str) -> str:
        """Return a recipe as it is, in one line of YAML."""
        recipe = named.recipe
        entries = [f"recipe: {recipe.name}"]
        if recipe.sharing != "none":
            entries.append("kv_ratios: [1.0]")
        if recipe.refinement != "none":
            entries.append(f"learning_rates: {fitted}")
        params = self._brief_params(recipe)
        if params:
            entries.append(f"params: {{{params}}}")
        remark = "    # the baseline" if recipe.name == BASELINE else ""
        return (recipe.name if len(entries) == 1 else f"{{{', '.join(entries)}}}") + remark

    def _refined_arm(self, recipe: Recipe, changed: Recipe, fitted: str) -> str:
        """Return a paper's conversion with our local fit: `recipe` as `refined` changed it."""
        relaxation = "relaxation: none, " if recipe.relaxation != "none" else ""
        # Recovery as all other arms have it: what a relaxation needs is not for the fit
        settings = [
            f"recovery.{knob}: as_configured"
            for knob in ("distillation", "decay")
            if recipe.knobs("recovery")[knob] != "as_configured"
        ]
        params = ", ".join(filter(None, [*settings, self._brief_params(changed)]))
        return (
            f"{{recipe: {recipe.name}, label: {recipe.name}_refined, "
            f"changes: {{{relaxation}refinement: fit_heal}}, "
            + (f"params: {{{params}}}, " if params else "")
            + f"learning_rates: {fitted}}}"
        )

    def _brief_params(self, recipe: Recipe) -> str:
        """Return settings that make a smoke test short."""
        if not self.smoke:
            return ""
        brief = {"refinement.fit_steps": 20, "objective.steps": 4}
        settings = dict(recipe.settings)
        return ", ".join(f"{name}: {value}" for name, value in brief.items() if name in settings)

    def _check_relaxations(self, names: Sequence[str]) -> None:
        """Raise ConfigError for relaxations where not all weights can be trained."""
        if self.trains_all_weights:
            return
        gib = self.hardware.gpu_memory / 2**30
        raise ConfigError(
            f"--compare: {', '.join(names)}: a relaxation trains all weights, which with Adam's "
            f"moments do not fit {gib:.0f} GiB; give more with --gpus and --gpu-memory, or leave "
            "these recipes out"
        )


def _listed(rates: Sequence[float]) -> str:
    return f"[{', '.join(f'{rate:.1e}' for rate in rates)}]"
