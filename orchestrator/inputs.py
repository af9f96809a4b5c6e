"""What a conversion is asked for, checked before texts and weights are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from orchestrator import models
from orchestrator.config import ConfigError
from orchestrator.models import Phases
from search_spaces.planning import check_budget, nearest_budget
from search_spaces.recipe import Recipe
from search_spaces.recipes import recipe as named_recipe


def check_ratio(kv_ratio: float, key: str = "kv_ratio") -> float:
    if not 0 < kv_ratio <= 1:
        raise ConfigError(f"{key}: got {kv_ratio}; a KV ratio must lie in (0, 1], e.g. 0.25 for a quarter of the cache")
    return kv_ratio


@dataclass(frozen=True)
class Inputs:
    """What a conversion is asked for, checked as far as can be without weights. `phases`: seconds that it took."""

    model: str
    recipe: Recipe
    tokenizer: Any
    calibration_data: str
    eval_data: str
    calibration_tokens: int
    eval_tokens: int
    sequence_length: int
    seed: int
    dtype: str
    device: str
    cache_dir: str | Path | None
    phases: Phases

    @classmethod
    def check(
        cls,
        model: str | Path,
        recipe: str | Recipe,
        kv_ratios: Sequence[float],
        *,
        nearest: bool = False,
        calibration_data: str = "stdlib",
        eval_data: str = "stdlib",
        calibration_tokens: int = 16_384,
        eval_tokens: int = 16_384,
        sequence_length: int = 256,
        seed: int = 0,
        dtype: str = "float32",
        device: str = "auto",
        cache_dir: str | Path | None = None,
        recipe_settings: Mapping[str, Any] | None = None,
        config_only: bool = False,
    ) -> Inputs:
        """Check all that can be checked before texts and weights are read.

        With `nearest` a ratio that the recipe cannot meet exactly is no mistake if a smaller one can be met. With
        `config_only` there need be neither weights nor a tokenizer.
        Raises ConfigError, RecipeError or ValueError for what a user can mend.
        """
        for ratio in kv_ratios:
            check_ratio(ratio)
        chosen = named_recipe(recipe, **dict(recipe_settings or {})) if isinstance(recipe, str) else recipe
        geometry = models.geometry_of(str(model), sequence_length, key="model", weights=not config_only)
        for ratio in kv_ratios:
            (nearest_budget if nearest else check_budget)(chosen, ratio, geometry)
        models.dtype_of(dtype)
        models.device_of(device)
        tokenizer = None if config_only else models.load_tokenizer(model)
        sources = (calibration_data, eval_data, calibration_tokens, eval_tokens, sequence_length)
        return cls(str(model), chosen, tokenizer, *sources, seed, dtype, device, cache_dir, Phases())

    def texts(self) -> tuple[Tensor, Tensor]:
        """Calibration and held-out token sequences. Raises DataError naming the source."""
        cut: Any = (self.sequence_length, self.seed)
        with self.phases("data"):
            return (
                models.texts(
                    self.calibration_data,
                    "calibration",
                    self.tokenizer,
                    self.calibration_tokens,
                    *cut,
                    cache_dir=self.cache_dir,
                ),
                models.texts(self.eval_data, "eval", self.tokenizer, self.eval_tokens, *cut, cache_dir=self.cache_dir),
            )
