"""What a conversion layer by layer can hold: which recipes and checkpoints, and how many sequences at once."""

from __future__ import annotations

from transformers import PretrainedConfig

from attention.io.layer_models import check_windows
from orchestrator.config.schema import ConfigError
from search_spaces.planning.budgets import LOOKS_AT_WEIGHTS
from search_spaces.recipes.recipe import Recipe

BATCH, ATTENTION_BYTES = 8, 128 * 2**20  # sequences run at once; less if their attention weights would take more


def check_layerwise(recipe: Recipe, config: PretrainedConfig) -> None:
    """Raise ConfigError saying which setting to change if a conversion by `recipe` needs more than one layer at once,
    and ValueError for a checkpoint whose layers cannot stand alone."""
    check_windows(config)
    parts, wrong = recipe.parts(), []
    if parts["allocation"].needs & LOOKS_AT_WEIGHTS:
        wrong.append(("allocation", "looks at all layers before any gets its heads", "uniform"))
    if recipe.objective is not None and parts["objective"].needs & {"measure", "fusion_distances"}:
        wrong.append(("objective", "runs the whole model", "least_squares"))
    if recipe.sharing != "none":
        wrong.append(("sharing", "compares the heads of all layers", "none"))
    if recipe.composition != "none":
        wrong.append(("composition", "is for a training, which holds the whole model", "none"))
    if wrong:
        why = ", ".join(f"{axis}={getattr(recipe, axis)} {reason}" for axis, reason, _ in wrong)
        instead = " ".join(f"--set {axis}={other}" for axis, _, other in wrong)
        raise ConfigError(
            f"recipe {recipe.name} cannot be converted layer by layer: {why}. Add {instead}, or take another recipe "
            "(headfold_gqa, least_squares, align, asymgqa, gqa), or convert in memory: --no-layerwise"
        )


def batch_size(num_heads: int, length: int) -> int:
    """Sequences of `length` tokens that are run at once."""
    return min(BATCH, max(1, ATTENTION_BYTES // (4 * num_heads * length**2)))
