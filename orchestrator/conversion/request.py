"""The request of a conversion, checked before texts and weights are read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedModel

from attention.base.memory import memory_peak
from attention.base.timing import Phases
from attention.checkpoint import Checkpoint
from attention.geometry import HeadGeometry
from attention.io import checkpoint
from attention.io.precision import DTYPES
from attention.io.stock_form import format_of
from attention.plan import AttentionPlan
from attention.ratios import (
    UNITS,
    amount,
    ceiling_note,
    own_bytes,
    own_cache,
    own_heads,
    ratio_of,
    ratio_of_bytes,
    ratio_of_kv_heads,
)
from orchestrator import checkpoints
from orchestrator.checkpoints import base_of
from orchestrator.config.options import ConversionOptions, PolishOptions
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.record import ConversionRecord
from search_spaces.planning.budgets import BelowLeast, check_budget, nearest_budget
from search_spaces.recipes import choice
from search_spaces.recipes.catalogue import recipe as named_recipe
from search_spaces.recipes.recipe import Recipe
from search_spaces.recipes.rules import keeps_everything, refused_by_family
from trainers.text.data import CALIBRATION_TOKENS, LoadedTexts, Texts, default_length

Number = TypeVar("Number", int, float)


RATIOS = "--kv-ratio 0.5,0.25 (shares of the checkpoint's own KV cache)"
HEADS = "--kv-heads 4,2 (of its KV heads)"
SIZES = "--kv-bytes 0.5 or 24KiB (of its KV bytes per token)"
BYTES_OF = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20}
KEYS = {"share": "kv_ratio", "heads": "kv_heads", "bytes": "kv_bytes"}


def parse_list(text: str, kind: Callable[[str], Number], key: str, example: str) -> list[Number]:
    """Return the numbers of a list such as `0.9,0.5`, each once.

    Args:
        text: The list.
        kind: Reads a number.
        key: The option.
        example: What is expected, in words.

    Raises:
        ConfigError: For anything but numbers of this kind.
    """
    try:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ConfigError:  # which says more
        raise
    except (ValueError, ArithmeticError):
        values = []
    if not values:
        raise ConfigError(f"{key}: expected {example}, got {text!r}")
    return list(dict.fromkeys(values))


def parse_share(text: str) -> float:
    """Return the number in `0.5` or `50%`.

    Raises:
        ArithmeticError: For anything else; or ValueError.
    """
    return float(Decimal(text[:-1]) / 100 if text.endswith("%") else Decimal(text))


def requested_ratios(
    model: checkpoints.CheckpointSource,
    kv_ratio: str | float | Sequence[float] | None,
    kv_heads: str | int | Sequence[int] | None,
    kv_bytes: str | float | Sequence[float] | None = None,
    *,
    dtype: str = checkpoints.AUTO,
    default: Sequence[float] = (),
    key: str = "model",
) -> list[float]:
    """Return the shares of the checkpoint's KV cache that the options request.

    Only config.json is read, and that only for heads and bytes.

    Args:
        model: The checkpoint.
        kv_ratio: `--kv-ratio`; like the next two a number, text, or several of them.
        kv_heads: `--kv-heads`.
        kv_bytes: `--kv-bytes`. One of the three must be given where there is no `default`.
        dtype: Of the cache, as the option has it.
        default: Ratios where none is requested; of these the ones that any plan can meet.
        key: The option by which the user has named the checkpoint.

    Raises:
        ConfigError: For what a user can mend.
    """
    options = {"kv_ratio": kv_ratio, "kv_heads": kv_heads, "kv_bytes": kv_bytes}
    texts = {name: _as_text(name, value) for name, value in options.items() if value is not None}
    if len(texts) > 1:
        got = " and ".join(f"{name} {text!r}" for name, text in texts.items())
        raise ConfigError(
            f"{', '.join(options)}: expected one of the three, got "
            f"{'both' if len(texts) == 2 else 'all:'} {got}; give {RATIOS}, {HEADS} or {SIZES}"
        )
    if kv_bytes is not None:
        return _ratios_of_bytes(model, texts["kv_bytes"], dtype, key)
    if kv_heads is None:
        if kv_ratio is None and not default:
            raise ConfigError(f"kv_ratio: expected {RATIOS}, {HEADS} or {SIZES}, got none of them")
        if kv_ratio is None:  # shares that any plan can meet
            stored = checkpoints.open_checkpoint(model, key, weights=False).geometry.num_kv_heads
            return [ratio for ratio in default if ratio * stored >= 1] or list(default)
        example = "a share like 0.5 or 50%, or a list like 0.5,0.25"
        return parse_list(texts["kv_ratio"], parse_share, "kv_ratio", example)
    example = "a whole number of KV heads per layer or a list like 4,2"
    counts = parse_list(texts["kv_heads"], int, "kv_heads", example)
    geometry = checkpoints.open_checkpoint(model, key, weights=False).geometry
    try:
        return [ratio_of_kv_heads(count, geometry) for count in counts]
    except ValueError as error:
        raise ConfigError(f"kv_heads: {error}") from None


def _as_text(key: str, value: Any) -> str:
    """Return numbers as the command line takes them. Raises ConfigError for none."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return str(value)
    numbers = [str(each) for each in value]
    if not numbers:
        raise ConfigError(f"{key}: expected at least one, e.g. 0.5")
    return ",".join(numbers)


def _ratios_of_bytes(
    model: checkpoints.CheckpointSource, text: str, dtype: str, key: str
) -> list[float]:
    """Return the shares that `--kv-bytes` requests: `0.5`, `50%`, or a size like `24KiB`."""
    source = checkpoints.open_checkpoint(model, key, weights=False)
    geometry = source.geometry
    dtype = checkpoints.written_dtype(source, dtype)

    def share(part: str) -> float:
        size = re.fullmatch(r"([0-9.]+) ?(B|KiB|MiB|)", part)
        if size is None or (not size[2] and float(size[1]) <= 1):
            if not geometry.other_layers:
                return parse_share(part)
            number = parse_share(part) * own_bytes(geometry, dtype)
        else:
            number = float(size[1]) * BYTES_OF[size[2]]
        ratio = ratio_of_bytes(number, geometry, dtype)
        if ratio <= 0 < number:
            raise ConfigError(
                f"kv_bytes: got {part!r}, and the layers that are not converted take more; "
                f"{own_cache(geometry, dtype)}: give more"
            )
        return ratio

    example = "a share like 0.5 or 50%, or bytes per token like 24KiB or 24576"
    ratios = parse_list(text, share, "kv_bytes", example)
    if (largest := max(ratios)) >= 1:
        raise ConfigError(
            f"kv_bytes: got {text!r}, {amount(largest, 'bytes', geometry, dtype)} bytes per token; "
            f"{own_cache(geometry, dtype)}: give less"
        )
    return ratios


def chosen_recipe(
    checkpoint: Checkpoint, recipe: str | Recipe, engine: str | None, settings: Mapping[str, Any]
) -> tuple[Recipe, HeadGeometry]:
    """Return the recipe to convert by, and report on stderr what `auto` stands for.

    With it the checkpoint's geometry, limited to the head counts that `engine` holds, or those
    engines that `auto` chooses for.

    Args:
        checkpoint: What is converted.
        recipe: A recipe, the name of one, or `auto`: the best one for the checkpoint and `engine`.
        engine: The engine that is to load the result; None for any.
        settings: Changes of the recipe.

    Raises:
        RecipeError: For unknown names.
        ConfigError: If `engine` cannot hold what the recipe makes.
    """
    engine = engine and choice.engine_name(engine)
    named = recipe
    if isinstance(recipe, str) and recipe != choice.AUTO_RECIPE:
        named = named_recipe(recipe, **settings)
    if isinstance(named, Recipe) and engine is None:
        return named, checkpoint.geometry
    best = choice.choose_recipe(checkpoint.config, checkpoint.geometry, engine)
    if not isinstance(named, Recipe):
        print(
            f"recipe: {best.recipe} (auto: {best.reason}; `headfold recipes` lists all)",
            file=sys.stderr,
            flush=True,
        )
        named = named_recipe(best.recipe, **settings)
    if engine is not None and (reasons := choice.refusals(named, best.forms[engine])):
        raise ConfigError(
            f"for: {choice.ENGINE_NAMES[engine]} cannot load what recipe {named.name} makes of "
            f"this checkpoint: {reasons[0]}; take --recipe {best.recipe}, or leave out --for"
        )
    engines = best.engines if engine is None else (engine,)
    forms = [best.forms[name] for name in engines]
    return named, choice.limited_geometry(named, checkpoint.geometry, forms)


@dataclass(frozen=True)
class ConversionRequest:
    """A conversion that was checked as far as can be without texts and weights (`check`).

    Attributes:
        checkpoint: What is converted.
        geometry: Its layers and heads, with the head counts that may be chosen.
        recipe: How.
        kv_ratios: Requested shares of the checkpoint's KV cache, each a ceiling (see `budget`).
        tokenizer: That of the checkpoint; None where only the config was checked.
        dtype: Name of the dtype of what is written.
        options: The options of the verb.
        phases: Seconds that it took.
    """

    checkpoint: Checkpoint
    geometry: HeadGeometry
    recipe: Recipe
    kv_ratios: tuple[float, ...]
    tokenizer: Any
    dtype: str
    options: ConversionOptions
    phases: Phases = field(default_factory=Phases)

    @classmethod
    def check(
        cls,
        checkpoint: Checkpoint,
        recipe: Recipe,
        kv_ratios: Sequence[float],
        options: ConversionOptions,
        *,
        key: str = "model",
        config_only: bool = False,
        geometry: HeadGeometry | None = None,
    ) -> ConversionRequest:
        """Check all that can be checked before texts and weights are read.

        A ratio that changes nothing is refused, and with `options.strict` one that the recipe
        cannot meet exactly.

        Args:
            checkpoint: What is converted.
            recipe: How.
            kv_ratios: Shares of the checkpoint's KV cache.
            options: Texts, dtype, device.
            key: The option by which the user has named the checkpoint.
            config_only: Whether there need be neither weights nor a tokenizer.
            geometry: The checkpoint's with fewer head counts, if an engine limits them.

        Raises:
            ConfigError: For what a user can mend.
            RecipeError: Likewise.
        """
        unit = options.unit
        for ratio in kv_ratios:
            if not 0 < ratio <= 1:
                mistyped = f"; did you mean {ratio:g}%?" if 2 <= ratio < 100 else ""
                raise ConfigError(
                    f"{KEYS[unit]}: got {ratio:g}; a KV ratio must lie in (0, 1), e.g. 0.25 or 25% "
                    f"for a quarter of the checkpoint's own cache{mistyped}"
                )
        length = options.sequence_length
        checkpoints.open_checkpoint(
            checkpoint, key, sequence_length=length, weights=not config_only
        )
        checkpoints.check_own_cache(checkpoint, "model")
        if recipe.sharing == recipe.composition == "none":
            checkpoints.check_several_heads(checkpoint)
        if reasons := refused_by_family(recipe.to_dict(), checkpoint.geometry):
            raise ConfigError(f"recipe: {recipe.name}: {'; '.join(reasons)}")
        dtype = checkpoints.written_dtype(checkpoint, options.dtype)
        geometry = geometry or checkpoint.geometry
        for ratio in kv_ratios:
            _check_ratio(geometry, recipe, ratio, dtype, options)
        checkpoints.device_of(options.device)
        tokenizer = None if config_only else checkpoints.load_tokenizer(checkpoint)
        return cls(checkpoint, geometry, recipe, tuple(kv_ratios), tokenizer, dtype, options)

    @property
    def polish(self) -> PolishOptions:
        """Whether, and how, converted models are trained at the end."""
        options = self.options
        return options if isinstance(options, PolishOptions) else PolishOptions()

    @property
    def seed(self) -> int:
        return self.options.seed

    @property
    def device(self) -> str:
        return self.options.device

    @property
    def cache_dir(self) -> str | Path | None:
        """The folder that keeps what was measured of the checkpoint."""
        return self.options.cache_dir

    @property
    def model(self) -> str:
        """The path or hub name of the checkpoint."""
        return self.checkpoint.path

    @property
    def config(self) -> PretrainedConfig:
        return self.checkpoint.config

    def budget(self, kv_ratio: float) -> Fraction:
        """Return the share of the checkpoint's KV heads to use where `kv_ratio` is requested."""
        return nearest_budget(self.recipe, kv_ratio, self.geometry)

    def distinct(self, *, report: bool = False) -> dict[Fraction, float]:
        """Return the budgets in falling order, and the smallest ratio that requested each.

        Args:
            report: Whether to report on stderr which ratios have the same budget.
        """
        requested = {self.budget(ratio): ratio for ratio in sorted(self.kv_ratios, reverse=True)}
        for ratio in self.kv_ratios if report else ():
            smallest = requested[self.budget(ratio)]
            if smallest != ratio:
                print(
                    f"note: {self.amount(ratio)} and {self.amount(smallest)} come to the same "
                    "plan: it is made once",
                    file=sys.stderr,
                    flush=True,
                )
        return requested

    def amount(self, kv_ratio: float) -> str:
        """Return a share in words, in the unit of the request."""
        unit = self.options.unit
        return amount(float(kv_ratio), unit, self.geometry, self.dtype) + UNITS[unit]

    def ceiling_note(self, kv_ratio: float, used: float) -> str:
        """Return in words that less than `kv_ratio` is used; empty if it is the same."""
        return ceiling_note(float(kv_ratio), used, self.options.unit, self.geometry, self.dtype)

    @property
    def written(self) -> torch.dtype:
        """The dtype to write."""
        return DTYPES[self.dtype]

    @property
    def working(self) -> torch.dtype:
        """The dtype to compute in."""
        return DTYPES[checkpoints.working_dtype(self.dtype, self.device)]

    def texts(self) -> LoadedTexts:
        """Read the calibration and the held-out token sequences.

        Raises:
            DataError: Naming the source.
        """
        options = self.options
        with self.phases("data"):
            texts = Texts(
                options.calibration_data, options.eval_data, options.text_field, options.seed
            )
            return texts.load(
                self.tokenizer,
                self.geometry.max_positions,
                calibration_tokens=options.calibration_tokens,
                eval_tokens=options.eval_tokens,
                sequence_length=options.sequence_length,
            )

    @property
    def text_sizes(self) -> tuple[int, int, int]:
        """Most tokens to calibrate on, to measure on, and per sequence, before texts are read."""
        calibration = self.options.calibration_tokens or CALIBRATION_TOKENS
        measured = self.options.eval_tokens or CALIBRATION_TOKENS
        length = self.options.sequence_length
        if length is None:
            length = default_length(self.geometry.max_positions, calibration, measured)
        return calibration, measured, length

    def load_model(self) -> PreTrainedModel:
        """Load the original model in the dtype to compute in. Raises WeightsError."""
        with self.phases("load"):
            return checkpoints.load_working(self.checkpoint, self.dtype, self.device)

    def note(self) -> dict[str, Any]:
        """Return the content of the note in the folder of the converted checkpoint."""
        heads = own_heads(self.geometry)
        return {
            "recipe": self.recipe.to_dict(),
            "seed": self.seed,
            **checkpoint.original_note(heads, self.geometry.head_dim, **base_of(self.model)),
        }

    def record(
        self,
        plan: AttentionPlan,
        kv_ratio: float,
        texts: LoadedTexts,
        measured: Mapping[str, Any],
        out: str | Path | None,
    ) -> ConversionRecord:
        """Return the record of a conversion; cost and seconds are yet to be added.

        Args:
            plan: The plan that was carried out.
            kv_ratio: The ratio that was requested.
            texts: What it was calibrated and measured on.
            measured: Losses and KL in nats per token with `trainers.evaluation.comparison` of them,
                and other measurements.
            out: The folder of the result, if any.
        """
        used = ratio_of(plan, own_heads(self.geometry))
        record: Any = {
            "model": self.checkpoint.name,
            **measured,
            **texts.facts,
            "calibration_tokens": int(texts.calibration.numel()),
            "kv_ratio": used,
            "kv_bytes_per_token": plan.kv_bytes_per_token(self.dtype),
            "kv_bytes_per_token_original": self.checkpoint.plan.kv_bytes_per_token(self.dtype),
            "kv_ratio_asked": float(kv_ratio),
            "ceiling": self.ceiling_note(float(kv_ratio), used),
            "recipe": self.recipe.to_dict(),
            "plan": plan.to_dict(),
            "plan_digest": plan.digest,
            "seed": self.seed,
            "dtype": self.dtype,
            "peak_memory": memory_peak(),
            **({} if out is None else format_of(out, self.dtype)),
            "out": None if out is None else str(out),
        }
        return record


def _check_ratio(
    geometry: HeadGeometry, recipe: Recipe, ratio: float, dtype: str, options: ConversionOptions
) -> None:
    """Raise ConfigError for a ratio that changes nothing, or that the recipe cannot meet."""
    unit = options.unit
    if reason := keeps_everything(recipe.sharing, recipe.composition, ratio):
        raise ConfigError(f"{KEYS[unit]}: {reason}; {own_cache(geometry, dtype)}")
    if options.strict:
        check_budget(recipe, ratio, geometry, dtype)
    try:
        nearest_budget(recipe, ratio, geometry)
    except BelowLeast as error:
        least = amount(float(error.least), unit, geometry, dtype) + UNITS[unit]
        requested = amount(float(ratio), unit, geometry, dtype)
        raise ConfigError(
            f"{KEYS[unit]}: recipe {recipe.name} keeps at least {least} on this checkpoint, got "
            f"{requested}; {own_cache(geometry, dtype)}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{KEYS[unit]}: {error}") from None
