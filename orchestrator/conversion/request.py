"""What a conversion is asked for, checked before texts and weights are read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedModel

from attention.checkpoint import Checkpoint
from attention.geometry import HeadGeometry
from attention.io import checkpoint
from attention.io.precision import DTYPES
from attention.io.sources import check_source
from attention.io.stock_form import format_of
from attention.plan import AttentionPlan
from attention.progress import stage
from attention.ratios import (
    UNITS,
    amount,
    ceiling_note,
    own_bytes,
    own_cache,
    own_heads,
    ratio_of,
    ratio_of_kv_heads,
)
from orchestrator import checkpoints
from orchestrator.checkpoints import base_of
from orchestrator.config.schema import ConfigError
from orchestrator.conversion import loading
from search_spaces.planning.budgets import BelowLeast, check_budget, nearest_budget
from search_spaces.recipes.recipe import Recipe
from search_spaces.recipes.recipes import recipe as named_recipe
from search_spaces.recipes.rules import keeps_everything
from trainers.text.data import TOKENS, LoadedTexts, Texts, default_length

Number = TypeVar("Number", int, float)


RATIOS = "--kv-ratio 0.5,0.25 (shares of the checkpoint's own KV cache)"
HEADS = "--kv-heads 4,2 (of its KV heads)"
SIZES = "--kv-bytes 0.5 or 24KiB (of its KV bytes per token)"
BYTES_OF = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20}
KEYS = {"share": "kv_ratio", "heads": "kv_heads", "bytes": "kv_bytes"}


def parse_list(text: str, kind: Callable[[str], Number], key: str, example: str) -> list[Number]:
    """`0.9,0.5` -> [0.9, 0.5], each once. Raises ConfigError for anything but numbers of this kind."""
    try:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except (ValueError, ArithmeticError):
        values = []
    if not values:
        raise ConfigError(f"{key}: expected {example}, got {text!r}")
    return list(dict.fromkeys(values))


def parse_share(text: str) -> float:
    """`0.5` or `50%`. Raises ArithmeticError or ValueError for anything else."""
    return float(Decimal(text[:-1]) / 100 if text.endswith("%") else Decimal(text))


def asked_ratios(
    model: checkpoints.Source,
    kv_ratio: str | None,
    kv_heads: str | None,
    kv_bytes: str | None = None,
    *,
    dtype: str = checkpoints.AUTO,
    default: Sequence[float] = (),
    key: str = "model",
) -> list[float]:
    """What `--kv-ratio`, `--kv-heads` or `--kv-bytes` request, as shares of the checkpoint's own KV cache.

    All are lists; one of them must be given where there are no `default` ratios. `dtype`: of the cache, as the option
    says it. Only config.json is read, and that only for heads and bytes. Raises ConfigError.
    """
    options = {"kv_ratio": kv_ratio, "kv_heads": kv_heads, "kv_bytes": kv_bytes}
    given = {name: text for name, text in options.items() if text is not None}
    if len(given) > 1:
        got = " and ".join(f"{name} {text!r}" for name, text in given.items())
        raise ConfigError(
            f"{', '.join(options)}: expected one of the three, got {'both' if len(given) == 2 else 'all:'} {got}; give "
            f"{RATIOS}, {HEADS} or {SIZES}"
        )
    if kv_bytes is not None:
        return _ratios_of_bytes(model, kv_bytes, dtype, key)
    if kv_heads is None:
        if kv_ratio is None and not default:
            raise ConfigError(f"kv_ratio: expected {RATIOS}, {HEADS} or {SIZES}, got none of them")
        if kv_ratio is None:  # those that any plan can meet
            stored = checkpoints.open_checkpoint(model, key, weights=False).geometry.num_kv_heads
            return [ratio for ratio in default if ratio * stored >= 1] or list(default)
        return parse_list(kv_ratio, parse_share, "kv_ratio", "a share like 0.5 or 50%, or a list like 0.5,0.25")
    counts = parse_list(kv_heads, int, "kv_heads", "a whole number of KV heads a layer or a list like 4,2")
    geometry = checkpoints.open_checkpoint(model, key, weights=False).geometry
    try:
        return [ratio_of_kv_heads(count, geometry) for count in counts]
    except ValueError as error:
        raise ConfigError(f"kv_heads: {error}") from None


def _ratios_of_bytes(model: checkpoints.Source, text: str, dtype: str, key: str) -> list[float]:
    """Shares that `--kv-bytes` requests: `0.5`, `50%`, or a size per token like `24KiB`."""
    source = checkpoints.open_checkpoint(model, key, weights=False)
    geometry, dtype = source.geometry, checkpoints.written_dtype(source, dtype)
    own = own_bytes(geometry, dtype)

    def share(part: str) -> float:
        size = re.fullmatch(r"([0-9.]+) ?(B|KiB|MiB|)", part)
        if size is None or (not size[2] and float(size[1]) <= 1):
            return parse_share(part)
        return float(size[1]) * BYTES_OF[size[2]] / own

    ratios = parse_list(text, share, "kv_bytes", "a share like 0.5 or 50%, or bytes per token like 24KiB or 24576")
    if (largest := max(ratios)) >= 1:
        raise ConfigError(
            f"kv_bytes: got {text!r}, {round(largest * own):,} bytes per token; {own_cache(geometry, dtype)}: give less"
        )
    return ratios


def unit_of(kv_heads: str | None, kv_bytes: str | None) -> str:
    """The unit in which the options request a budget, and in which the answer is given (`attention.ratios.UNITS`)."""
    return "heads" if kv_heads is not None else "bytes" if kv_bytes is not None else "share"


@dataclass(frozen=True)
class ConversionRequest:
    """What a conversion is asked for, checked as far as can be without weights (`check`).

    `source`: the checkpoint; `dtype`: of what is written, by name; `unit`: in which budgets were requested
    (`attention.ratios.UNITS`); `phases`: seconds that it took; the texts and how much of them: see
    `trainers.text.data.Texts`.
    """

    source: Checkpoint
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
    unit: str = "share"
    phases: loading.Phases = field(default_factory=loading.Phases)

    @classmethod
    def check(
        cls,
        model: checkpoints.Source,
        recipe: str | Recipe,
        kv_ratios: Sequence[float],
        *,
        strict: bool = False,
        dtype: str = checkpoints.AUTO,
        recipe_settings: Mapping[str, Any] | None = None,
        config_only: bool = False,
        **settings: Any,
    ) -> ConversionRequest:
        """Check all that can be checked before texts and weights are read.

        `kv_ratios` are shares of the checkpoint's own KV cache, each a ceiling (see `budget`); one that changes nothing
        is refused, and with `strict` one that the recipe cannot meet exactly. With `config_only` there need be neither
        weights nor a tokenizer. `settings` are the fields that have a default.
        Raises ConfigError, RecipeError or ValueError for what a user can mend, TypeError for a model that is no path.
        """
        if not isinstance(model, Checkpoint):
            check_source(model, "model")
        unit = settings.get("unit", cls.unit)
        for ratio in kv_ratios:
            if not 0 < ratio <= 1:
                mistyped = f"; did you mean {ratio:g}%?" if 2 <= ratio < 100 else ""
                raise ConfigError(
                    f"{KEYS[unit]}: got {ratio:g}; a KV ratio must lie in (0, 1), e.g. 0.25 or 25% for a quarter of "
                    f"the checkpoint's own cache{mistyped}"
                )
        chosen = named_recipe(recipe, **dict(recipe_settings or {})) if isinstance(recipe, str) else recipe
        length = settings.get("sequence_length")
        source = checkpoints.open_checkpoint(model, sequence_length=length, weights=not config_only)
        geometry = source.geometry
        checkpoints.check_own_cache(source, "model")
        if chosen.sharing == chosen.composition == "none":
            checkpoints.check_several_heads(source)
        dtype = checkpoints.written_dtype(source, dtype)
        for ratio in kv_ratios:
            if reason := keeps_everything(chosen.sharing, chosen.composition, ratio):
                raise ConfigError(f"{KEYS[unit]}: {reason}; {own_cache(geometry, dtype)}")
            if strict:
                check_budget(chosen, ratio, geometry, dtype)
            try:
                nearest_budget(chosen, ratio, geometry)
            except BelowLeast as error:
                least, asked = (amount(float(r), unit, geometry, dtype) for r in (error.least, ratio))
                raise ConfigError(
                    f"{KEYS[unit]}: recipe {chosen.name} keeps at least {least}{UNITS[unit]} on this checkpoint, got "
                    f"{asked}; {own_cache(geometry, dtype)}"
                ) from None
            except ValueError as error:
                raise ConfigError(f"{KEYS[unit]}: {error}") from None
        checkpoints.device_of(settings.get("device", cls.device))
        tokenizer = None if config_only else checkpoints.load_tokenizer(source)
        return cls(source, chosen, tokenizer, dtype, **settings)

    @property
    def model(self) -> str:
        """The path or hub name of the checkpoint."""
        return self.source.path

    @property
    def config(self) -> PretrainedConfig:
        return self.source.config

    @property
    def geometry(self) -> HeadGeometry:
        return self.source.geometry

    def budget(self, kv_ratio: float) -> Fraction:
        """The share of the checkpoint's KV heads that is used where `kv_ratio` was requested."""
        return nearest_budget(self.recipe, kv_ratio, self.geometry)

    def distinct(self, kv_ratios: Sequence[float], *, report: bool = False) -> dict[Fraction, float]:
        """Budgets in falling order, and the smallest ratio that requested each: what several come to is used once.

        `report`: say so on stderr.
        """
        requested = {self.budget(ratio): ratio for ratio in sorted(kv_ratios, reverse=True)}
        for ratio in kv_ratios if report else ():
            if (kept := requested[self.budget(ratio)]) != ratio:
                one, other = (self.amount(r) for r in (ratio, kept))
                print(f"note: {one} and {other} come to the same plan: it is made once", file=sys.stderr, flush=True)
        return requested

    def amount(self, kv_ratio: float) -> str:
        """A share in the unit of the request."""
        return amount(float(kv_ratio), self.unit, self.geometry, self.dtype) + UNITS[self.unit]

    def ceiling_note(self, kv_ratio: float, used: float) -> str:
        """What is used where `kv_ratio` was requested, in words; empty if it is the same."""
        return ceiling_note(float(kv_ratio), used, self.unit, self.geometry, self.dtype)

    @property
    def written(self) -> torch.dtype:
        """What is written in."""
        return DTYPES[self.dtype]

    @property
    def working(self) -> torch.dtype:
        """What is computed in."""
        return DTYPES[checkpoints.working_dtype(self.dtype, self.device)]

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
            return checkpoints.load_working(self.source, self.dtype, self.device)

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
        kv_ratio: float,
        texts: LoadedTexts,
        measured: Mapping[str, Any],
        out: str | Path | None,
    ) -> dict[str, Any]:
        """The result of a conversion to `plan`, `kv_ratio` having been requested, calibrated and measured on `texts`.

        `measured`: losses and KL in nats per token with what `trainers.evaluation.comparison` makes of them, and what
        else only a model tells; `out`: where it was saved.
        """
        used = ratio_of(plan, own_heads(self.geometry))
        return {
            "model": self.source.name,
            **measured,
            **texts.facts,
            "calibration_tokens": int(texts.calibration.numel()),
            "kv_ratio": used,
            "kv_bytes_per_token": plan.kv_bytes_per_token(self.dtype),
            "kv_bytes_per_token_original": self.source.plan.kv_bytes_per_token(self.dtype),
            "kv_ratio_asked": float(kv_ratio),
            "ceiling": self.ceiling_note(float(kv_ratio), used),
            "recipe": self.recipe.to_dict(),
            "plan": plan.to_dict(),
            "plan_digest": plan.digest,
            "seed": self.seed,
            "dtype": self.dtype,
            "peak_memory": loading.memory_peak(),
            **({} if out is None else format_of(out, self.dtype)),
            "out": None if out is None else str(out),
        }
