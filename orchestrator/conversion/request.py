"""What a conversion is asked for, checked before texts and weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedModel

from attention.families import geometry_of
from attention.geometry import HeadGeometry
from attention.io import checkpoint
from attention.io.precision import DTYPES
from attention.io.sources import check_source, source_name
from attention.io.stock_form import format_of
from attention.modeling.modeling import plan_of_config
from attention.plan import AttentionPlan
from attention.progress import stage
from attention.ratios import own_cache, own_heads, ratio_of, ratio_of_kv_heads
from orchestrator.config.schema import ConfigError
from orchestrator.conversion import loading
from orchestrator.reporting.base_model import base_of
from search_spaces.planning.budgets import check_budget, nearest_budget
from search_spaces.recipes.recipe import Recipe
from search_spaces.recipes.recipes import recipe as named_recipe
from search_spaces.recipes.rules import keeps_everything
from trainers.text.data import TOKENS, LoadedTexts, Texts, default_length

Number = TypeVar("Number", int, float)


RATIOS, HEADS = "--kv-ratio 0.5,0.25 (shares of the checkpoint's own KV cache)", "--kv-heads 4,2 (of its KV heads)"


def parse_list(text: str, kind: Callable[[str], Number], key: str, example: str) -> list[Number]:
    """`0.9,0.5` -> [0.9, 0.5], each once. Raises ConfigError for anything but numbers of this kind."""
    try:
        values = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values:
        raise ConfigError(f"{key}: expected {example}, got {text!r}")
    return list(dict.fromkeys(values))


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
        text = str(kv_ratio if kv_ratio is not None else default)
        return parse_list(text, float, "kv_ratio", "a number or a list like 0.5,0.25")
    counts = parse_list(kv_heads, int, "kv_heads", "a whole number of KV heads a layer or a list like 4,2")
    geometry = loading.geometry_of(str(model), key=key, weights=False)
    try:
        return [ratio_of_kv_heads(count, geometry) for count in counts]
    except ValueError as error:
        raise ConfigError(f"kv_heads: {error}") from None


@dataclass(frozen=True)
class ConversionRequest:
    """What a conversion is asked for, checked as far as can be without weights (`check`).

    `config`: of the checkpoint; `dtype`: of what is written, by name; `phases`: seconds that it took; the texts and
    how much of them: see `trainers.text.data.Texts`.
    """

    model: str
    config: PretrainedConfig
    recipe: Recipe
    tokenizer: Any
    dtype: str
    calibration_data: str | None = None
    eval_data: str | None = None
    text_field: str = "text"
    calibration_tokens: int | None = None
    eval_tokens: int | None = None
    sequence_length: int | None = None
    seed: int = 0
    device: str = "auto"
    cache_dir: str | Path | None = None
    phases: loading.Phases = field(default_factory=loading.Phases)

    @classmethod
    def check(
        cls,
        model: str | Path,
        recipe: str | Recipe,
        kv_ratios: Sequence[float],
        *,
        nearest: bool = False,
        dtype: str = loading.AUTO,
        recipe_settings: Mapping[str, Any] | None = None,
        config_only: bool = False,
        **settings: Any,
    ) -> ConversionRequest:
        """Check all that can be checked before texts and weights are read.

        `kv_ratios` are shares of the checkpoint's own KV cache; one that changes nothing is refused. With `nearest` a
        ratio that the recipe cannot meet exactly is no mistake if a smaller one can be met. With `config_only` there
        need be neither weights nor a tokenizer. `settings` are the fields that have a default.
        Raises ConfigError, RecipeError or ValueError for what a user can mend, TypeError for a model that is no path.
        """
        check_source(model, "model")
        for ratio in kv_ratios:
            if not 0 < ratio <= 1:
                raise ConfigError(
                    f"kv_ratio: got {ratio}; a KV ratio must lie in (0, 1], e.g. 0.25 for a quarter of the "
                    "checkpoint's own cache"
                )
        chosen = named_recipe(recipe, **dict(recipe_settings or {})) if isinstance(recipe, str) else recipe
        length = settings.get("sequence_length")
        geometry = loading.geometry_of(str(model), length, key="model", weights=not config_only)
        config = checkpoint.load_config(model)
        loading.check_own_cache(config, geometry, str(model), "model")
        if chosen.sharing == chosen.composition == "none":
            loading.check_several_heads(geometry, str(model))
        dtype = loading.written_dtype(model, dtype)
        for ratio in kv_ratios:
            if reason := keeps_everything(chosen.sharing, chosen.composition, ratio):
                raise ConfigError(f"kv_ratio: {reason}; {own_cache(geometry, dtype)}")
            if nearest:
                nearest_budget(chosen, ratio, geometry)
            else:
                check_budget(chosen, ratio, geometry, dtype)
        loading.device_of(settings.get("device", cls.device))
        tokenizer = None if config_only else loading.load_tokenizer(model)
        return cls(str(model), config, chosen, tokenizer, dtype, **settings)

    @property
    def geometry(self) -> HeadGeometry:
        return geometry_of(self.config)

    @property
    def written(self) -> torch.dtype:
        """What is written in."""
        return DTYPES[self.dtype]

    @property
    def working(self) -> torch.dtype:
        """What is computed in."""
        return DTYPES[loading.working_dtype(self.dtype, self.device)]

    @contextmanager
    def layer_phase(self, name: str, layer: int, doing: str) -> Iterator[None]:
        """A phase of a conversion layer by layer: its seconds count under `name`, and it is shown as `doing`, the words
        for what is done with layer `layer` (from 0)."""
        with self.phases(name), stage(f"layer {layer + 1} of {self.geometry.num_layers}, {doing}"):
            yield

    def texts(self) -> LoadedTexts:
        """Calibration and held-out token sequences. Raises DataError naming the source."""
        with self.phases("data"):
            return Texts(self.calibration_data, self.eval_data, self.text_field, self.seed).load(
                self.tokenizer,
                self.geometry.max_positions,
                calibration_tokens=self.calibration_tokens,
                eval_tokens=self.eval_tokens,
                sequence_length=self.sequence_length,
            )

    @property
    def text_sizes(self) -> tuple[int, int, int]:
        """Tokens to calibrate on, tokens to measure on, and tokens a sequence: at most, before a text is read."""
        tokens = self.calibration_tokens or TOKENS, self.eval_tokens or TOKENS
        return (*tokens, self.sequence_length or default_length(self.geometry.max_positions, *tokens))

    def load_model(self) -> PreTrainedModel:
        """The original model, in what is computed in. Raises WeightsError."""
        with self.phases("load"):
            return loading.load_working(self.model, self.dtype, self.device)

    def note(self) -> dict[str, Any]:
        """What is kept beside the weights of the converted checkpoint."""
        heads = own_heads(self.geometry)
        return {
            "recipe": self.recipe.to_dict(),
            "seed": self.seed,
            **checkpoint.original_note(heads, **base_of(self.model)),
        }

    def record(
        self,
        plan: AttentionPlan,
        kv_ratio: float | Fraction,
        texts: LoadedTexts,
        measured: Mapping[str, Any],
        out: str | Path | None,
    ) -> dict[str, Any]:
        """The result of a conversion to `plan`, of which `kv_ratio` was asked for, calibrated and measured on `texts`.

        `measured`: losses and KL in nats per token with what `trainers.evaluation.comparison` makes of them, and what
        else only a model tells; `out`: where it was saved.
        """
        return {
            "model": source_name(self.model),
            **measured,
            **texts.facts,
            "calibration_tokens": int(texts.calibration.numel()),
            "kv_ratio": ratio_of(plan, own_heads(self.geometry)),
            "kv_bytes_per_token": plan.kv_bytes_per_token(self.dtype),
            "kv_bytes_per_token_original": plan_of_config(self.config).kv_bytes_per_token(self.dtype),
            "kv_ratio_asked": float(kv_ratio),
            "recipe": self.recipe.to_dict(),
            "plan": plan.to_dict(),
            "plan_digest": plan.digest,
            "seed": self.seed,
            "dtype": self.dtype,
            "peak_memory": loading.memory_peak(),
            **({} if out is None else format_of(out, self.dtype)),
            "out": None if out is None else str(out),
        }
