"""A size in engine bytes, spent on bits, heads and width: which of them lose least together.

A cache of a given size holds few heads in 16 bits, or more of them in fewer bits. Each combination
is converted with few steps of the local fit, and measured with its cache rounded as the engine
rounds it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from attention.base.progress import stage
from attention.base.text import number
from attention.cache_formats import (
    LLAMA_CPP,
    VLLM,
    CacheFormatError,
    CacheOption,
    CachePair,
    FormatRecord,
    cache_options,
    offered_formats,
)
from attention.checkpoint import Checkpoint
from attention.geometry import HeadGeometry
from attention.ratios import byte_share, percent
from orchestrator.config.options import AUTO_FORMAT, ConvertOptions
from orchestrator.config.parsing import ConfigError, read_cache_format
from orchestrator.conversion.memory_store import MemoryStore
from orchestrator.conversion.record import CombinationRecord
from orchestrator.conversion.request import requested_ratios
from orchestrator.conversion.short_fits import ShortFits
from search_spaces.planning.budgets import nearest_budget
from search_spaces.recipes import choice
from search_spaces.recipes.recipe import Recipe

_FULL_FIT = 0.5
"""Share of the loss increase after a short fit that remains after a full one
(benchmarks/LOG.md)."""
_FORMAT_ENGINES = {"llama.cpp": LLAMA_CPP, "vllm": VLLM}


@dataclass(frozen=True)
class CacheChoice:
    """The best of the combinations that were compared.

    Attributes:
        option: Its format.
        recipe: Its recipe; None for the checkpoint as it is.
        combinations: All of them.
    """

    option: CacheOption
    recipe: Recipe | None
    combinations: list[CombinationRecord]

    def report(self, share: float) -> None:
        """Say on stderr what was compared for a cache of so large a share of the bytes."""
        lines = [f"a cache of {percent(share)} of the bytes, by a short fit:"]
        for one in self.combinations:
            words = "the checkpoint as it is"
            if one["recipe"] is not None:
                words = f"{one['recipe']} with {percent(one['kv_ratio'])} of the heads"
            loss = "not tried: fewer heads lose more"
            if (increase := one["loss_increase"]) is not None:
                loss = f"loss increase {number(increase, '+.4f')}"
            if (heads := one["heads_loss_increase"]) is not None:
                loss += f" ({number(heads, '+.4f')} in 16 bits)"
            chosen = one["cache_format"] == self.option.pair.name and (
                one["recipe"] == (self.recipe and self.recipe.name)
            )
            lines.append(f"  {one['cache_format']:9}  {words:45} {loss}{'  <- taken' * chosen}")
        print("\n".join(lines), file=sys.stderr, flush=True)


def _by_budget(
    recipe: Recipe, options: Sequence[CacheOption], geometry: HeadGeometry
) -> dict[Fraction, CacheOption]:
    """Return the format of most bytes for each number of heads that some format leaves room for."""
    by_budget: dict[Fraction, CacheOption] = {}
    for option in options:
        if option.kv_ratio < 1:
            with contextlib.suppress(ValueError):  # no plan has so few heads
                by_budget[nearest_budget(recipe, option.kv_ratio, geometry)] = option
    return by_budget


def choose_cache(
    store: MemoryStore, options: Sequence[CacheOption], recipes: Sequence[Recipe]
) -> CacheChoice:
    """Compare cache formats with the heads that each leaves room for, and return the best.

    Each is rated by its expected loss with a full fit, beginning with the format of fewest bytes,
    which leaves room for most heads. Fewer heads lose more, in any format: once the previous ones
    lose more than the best combination, the rest is skipped.

    Args:
        store: The checkpoint, calibrated for all of the recipes.
        options: Of `attention.cache_formats.cache_options`, by rising bytes.
        recipes: By which heads are taken away.

    Raises:
        ConfigError: If no combination has so few bytes.
    """
    fits = ShortFits(store)
    combinations: list[CombinationRecord] = []
    best: tuple[float, CacheOption, Recipe | None] | None = None
    # Of the formats that hold all heads, that of most bytes
    whole = [option for option in options if option.kv_ratio >= 1][-1:]
    jobs: list[tuple[CacheOption, Recipe | None, Fraction]] = [
        *((option, None, Fraction(1)) for option in whole),
        *(
            (option, recipe, budget)
            for recipe in recipes
            for budget, option in _by_budget(recipe, options, store.request.geometry).items()
        ),
    ]
    heads: dict[str | None, float] = {}
    with stage("comparing caches", len(jobs), "combinations") as progress:
        for option, recipe, budget in jobs:
            name = recipe and recipe.name
            record: CombinationRecord = {
                "cache_format": option.pair.name,
                "recipe": name,
                "kv_ratio": float(budget),
                "loss_increase": None,
                "heads_loss_increase": None,
            }
            if best is None or _FULL_FIT * heads.get(name, 0.0) < best[0]:
                model = store.original
                if recipe is not None:
                    model = fits.converted(recipe, budget)
                    heads[name] = record["heads_loss_increase"] = fits.increase(model)
                increase = fits.increase(model, option.pair)
                record["loss_increase"] = increase
                expected = increase - (1 - _FULL_FIT) * heads.get(name, 0.0)
                if best is None or expected < best[0]:
                    best = expected, option, recipe
            combinations.append(record)
            progress.step()
    if best is None:
        raise ConfigError(
            f"kv_bytes: recipe {' and '.join(recipe.name for recipe in recipes)} cannot take so "
            "many heads away, in any cache format; give more"
        )
    return CacheChoice(best[1], best[2], combinations)


def take_choice(store: MemoryStore, chosen: CacheChoice) -> float:
    """Let a store convert by the chosen recipe, and measure with the chosen format too.

    Returns:
        The KV ratio to convert at.

    Raises:
        ConfigError: If the checkpoint as it is loses least.
    """
    pair = chosen.option.pair
    if chosen.recipe is None:
        flags = "; ".join(f"{engine} {pair.flags(engine)}" for engine in pair.engines)
        raise ConfigError(
            f"kv_bytes: nothing to convert: the checkpoint as it is, with a cache in {pair.name} "
            f"({percent(chosen.option.share)} of the bytes), loses least; serve it by {flags}, or "
            "convert for a cache of 16 bits: --cache-format f16"
        )
    store.request = replace(store.request, recipe=chosen.recipe)
    store.cache_pair = pair
    return chosen.option.kv_ratio


@dataclass(frozen=True)
class EngineBudget:
    """A cache size in engine bytes, and what it can be spent on.

    Attributes:
        shares: Requested shares of the bytes of the checkpoint's cache in 16 bits.
        options: Cache formats with the heads that the first of them leaves room for; one option a
            share where the format is named.
        automatic: Whether the format is to be chosen.
    """

    shares: tuple[float, ...]
    options: tuple[CacheOption, ...]
    automatic: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint, options: ConvertOptions) -> EngineBudget | None:
        """Return the budget that options request; None where they count 16 bits a number.

        Raises:
            ConfigError: For options that do not go together, or a size that needs no conversion.
        """
        engine = _engine_of_formats(options)
        automatic = options.cache_format == AUTO_FORMAT or (
            options.cache_format is None and engine is not None and options.kv_bytes is not None
        )
        if options.cache_format is None and not automatic:
            return None
        if options.layerwise:
            raise ConfigError(
                "cache_format: layer by layer nothing is measured in a cache format; leave it out, "
                "give --kv-ratio, and measure with `headfold evaluate --cache-format`"
            )
        if automatic and (engine is None or options.kv_bytes is None):
            raise ConfigError(
                "cache_format: auto spends the bytes of --kv-bytes for an engine with cache "
                f"formats; give --kv-bytes and --for {' or '.join(_FORMAT_ENGINES)}"
            )
        pair = None if automatic else read_cache_format(str(options.cache_format))
        name = _FORMAT_ENGINES[engine] if engine else pair.engines[0] if pair else LLAMA_CPP
        if options.kv_bytes is None:
            _options(checkpoint, name, [1.0], pair)
            return None
        ratios = requested_ratios(
            checkpoint, options.kv_ratio, options.kv_heads, options.kv_bytes, dtype="float16"
        )
        shares = [byte_share(ratio, checkpoint.geometry) for ratio in ratios]
        if automatic and len(shares) > 1:
            raise ConfigError(
                "kv_bytes: one size at a time is divided between bits and heads; give one, or name "
                "the format: --cache-format q8_0"
            )
        candidates = _options(checkpoint, name, shares, pair)
        # A named format is one option a share
        for share, option in () if automatic else zip(shares, candidates, strict=True):
            if option.kv_ratio >= 1:
                raise ConfigError(
                    f"kv_bytes: nothing to convert: all heads in {option.pair.name} take "
                    f"{percent(option.share)} of the bytes, and {percent(share)} was requested; "
                    f"serve the checkpoint as it is by {name} {option.pair.flags(name)}, or give "
                    "less"
                )
        return cls(tuple(shares), tuple(candidates), automatic)

    def kv_ratios(self, recipe: Recipe, geometry: HeadGeometry) -> list[float]:
        """Return the shares of the KV heads that fit the remaining bytes.

        Only shares that a plan of the recipe meets are considered, and less than all.
        """
        ratios = [option.kv_ratio for option in self.options]
        if not self.automatic:
            return ratios
        possible = []
        for ratio in ratios:
            with contextlib.suppress(ValueError):
                if ratio < 1:
                    nearest_budget(recipe, ratio, geometry)
                    possible.append(ratio)
        return possible or [min(ratios)]


def _options(
    checkpoint: Checkpoint, engine: str, shares: Sequence[float], pair: CachePair | None
) -> list[CacheOption]:
    """Return the formats for each share (`cache_options`).

    Raises:
        ConfigError: For a format that the engine does not hold for such heads.
    """
    try:
        return [
            option
            for share in shares
            for option in cache_options(checkpoint.plan, engine, share, pair)
        ]
    except CacheFormatError as error:
        raise ConfigError(f"cache_format: {error}") from None


def _engine_of_formats(options: ConvertOptions) -> str | None:
    """Return the engine of the options if it has cache formats."""
    engine = options.engine and choice.engine_name(options.engine)
    return engine if engine in _FORMAT_ENGINES else None


def formats_alone(checkpoint: Checkpoint, engine: str | None) -> list[FormatRecord]:
    """Return what a checkpoint as it is takes in the cache formats of an engine, or of any."""
    return offered_formats(checkpoint.plan, engine and choice.engine_name(engine))
