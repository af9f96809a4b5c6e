"""What a conversion is asked for, checked before texts and weights are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from attention.io import checkpoint
from attention.ratios import own_cache, ratio_of_kv_heads
from orchestrator.config.schema import ConfigError
from orchestrator.conversion import loading
from orchestrator.conversion.loading import Phases
from search_spaces.planning.budgets import check_budget, nearest_budget
from search_spaces.recipes.recipe import Recipe
from search_spaces.recipes.recipes import recipe as named_recipe
from search_spaces.recipes.rules import keeps_everything

Number = TypeVar("Number", int, float)


RATIOS, HEADS = "--kv-ratio 0.5,0.25 (shares of the checkpoint's own KV cache)", "--kv-heads 4,2 (of its KV heads)"


def check_ratio(kv_ratio: float, key: str = "kv_ratio") -> float:
    if not 0 < kv_ratio <= 1:
        raise ConfigError(
            f"{key}: got {kv_ratio}; a KV ratio must lie in (0, 1], e.g. 0.25 for a quarter of the checkpoint's "
            "own cache"
        )
    return kv_ratio


def parse_list(text: str, kind: Callable[[str], Number], key: str, example: str) -> list[Number]:
    """`0.9,0.5` -> [0.9, 0.5], each once. Raises ConfigError for anything but numbers of this kind."""
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found:
        raise ConfigError(f"{key}: expected {example}, got {text!r}")
    return list(dict.fromkeys(found))


def parse_ratios(text: str) -> list[float]:
    """The value of `--kv-ratio`. Raises ConfigError for anything but numbers."""
    return parse_list(text, float, "kv_ratio", "a number or a list like 0.5,0.25")


def asked_ratios(
    model: str | Path, kv_ratio: str | None, kv_heads: str | None, default: str | None = None, key: str = "model"
) -> list[float]:
    """What `--kv-ratio` and `--kv-heads` ask for, as shares of the checkpoint's own KV cache.

    Both are lists; one of them must be given where there is no `default` ratio. Only config.json is read, and that only
    for KV heads. Raises ConfigError.
    """
    if kv_ratio is not None and kv_heads is not None:
        raise ConfigError(
            f"kv_ratio, kv_heads: expected one of the two, got both ({kv_ratio!r} and {kv_heads!r}); give {RATIOS} or "
            f"{HEADS}"
        )
    if kv_heads is None:
        if (kv_ratio or default) is None:
            raise ConfigError(f"kv_ratio: expected {RATIOS} or {HEADS}, got neither")
        return parse_ratios(str(kv_ratio if kv_ratio is not None else default))
    counts = parse_list(kv_heads, int, "kv_heads", "a whole number of KV heads a layer or a list like 4,2")
    geometry = loading.geometry_of(str(model), key=key, weights=False)
    try:
        return [ratio_of_kv_heads(count, geometry) for count in counts]
    except ValueError as error:
        raise ConfigError(f"kv_heads: {error}") from None


@dataclass(frozen=True)
class Inputs:
    """What a conversion is asked for, checked as far as can be without weights. `dtype`: of what is written, by name;
    `phases`: seconds that it took."""

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
        dtype: str = loading.AUTO,
        device: str = "auto",
        cache_dir: str | Path | None = None,
        recipe_settings: Mapping[str, Any] | None = None,
        config_only: bool = False,
    ) -> Inputs:
        """Check all that can be checked before texts and weights are read.

        `kv_ratios` are shares of the checkpoint's own KV cache; one that changes nothing is refused. With `nearest` a
        ratio that the recipe cannot meet exactly is no mistake if a smaller one can be met. With `config_only` there
        need be neither weights nor a tokenizer.
        Raises ConfigError, RecipeError or ValueError for what a user can mend.
        """
        for ratio in kv_ratios:
            check_ratio(ratio)
        chosen = named_recipe(recipe, **dict(recipe_settings or {})) if isinstance(recipe, str) else recipe
        geometry = loading.geometry_of(str(model), sequence_length, key="model", weights=not config_only)
        config = checkpoint.load_config(model)
        loading.check_own_cache(config, geometry, str(model), "model")
        dtype = loading.written_dtype(model, dtype)
        for ratio in kv_ratios:
            if reason := keeps_everything(chosen.sharing, chosen.composition, ratio):
                raise ConfigError(f"kv_ratio: {reason}; {own_cache(geometry, dtype)}")
            if nearest:
                nearest_budget(chosen, ratio, geometry)
            else:
                check_budget(chosen, ratio, geometry, dtype)
        loading.device_of(device)
        tokenizer = None if config_only else loading.load_tokenizer(model)
        sources = (calibration_data, eval_data, calibration_tokens, eval_tokens, sequence_length)
        return cls(str(model), chosen, tokenizer, *sources, seed, dtype, device, cache_dir, Phases())

    def texts(self) -> tuple[Tensor, Tensor]:
        """Calibration and held-out token sequences. Raises DataError naming the source."""
        cut: Any = (self.sequence_length, self.seed)
        with self.phases("data"):
            return (
                loading.texts(
                    self.calibration_data,
                    "calibration",
                    self.tokenizer,
                    self.calibration_tokens,
                    *cut,
                    cache_dir=self.cache_dir,
                ),
                loading.texts(self.eval_data, "eval", self.tokenizer, self.eval_tokens, *cut, cache_dir=self.cache_dir),
            )
