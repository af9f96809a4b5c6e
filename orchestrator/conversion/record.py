"""The record of a conversion, key by key: the JSON of `headfold convert`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from trainers.rounded_caches import RoundedCacheRow


class CombinationRecord(TypedDict):
    """A cache format with the heads that it leaves room for, converted with a short fit.

    Losses are increases over the original on a sample, in nats per token; None where nothing was
    converted, since more heads lose more than another combination.
    """

    cache_format: str
    recipe: str | None
    """None: the checkpoint unchanged."""
    kv_ratio: float
    """Share of the KV heads."""
    loss_increase: float | None
    heads_loss_increase: float | None
    """With the cache in 16 bits."""


class FitWorkRecord(TypedDict):
    """The fields of `attention.conversion.refinement.refine.FitWork`."""

    optimizer_steps: int
    tokens: int
    flops: float


class FitRecord(TypedDict):
    """The fields of `attention.conversion.refinement.refine.LayerFit`."""

    step: str
    layer: int
    before: float
    after: float
    work: FitWorkRecord


class PolishRecord(TypedDict):
    """The fields of `trainers.polish.PolishWork`: training, which `cost` does not count."""

    steps: int
    tokens: int
    flops: float
    weights: str
    learning_rate: float
    first_loss: float
    last_loss: float


class ConversionPoint(TypedDict):
    """A conversion at one KV ratio.

    Losses and KL are in nats per token, bytes are KV bytes per token.
    """

    loss: float
    """Held-out loss of the converted model."""
    kl: float
    """Held-out KL divergence from the original model."""
    loss_increase: float
    loss_increase_stderr: float | None
    """Standard error of the increase over the held-out sequences; None for one sequence."""
    perplexity: float
    notes: NotRequired[list[str]]
    kv_ratio: float
    """The used share of the checkpoint's KV cache."""
    kv_ratio_asked: float
    """The share that was requested."""
    ceiling: str
    """Why less than what was requested is used, in words; empty where it is the same."""
    kv_bytes_per_token: int
    cache_bytes_measured: int
    """Bytes of a cache that was filled with `cache_tokens` tokens."""
    cache_tokens: int
    parameters: int
    cost: dict[str, float]
    """Optimizer steps, tokens, floating-point operations and seconds of the conversion."""
    polish: NotRequired[PolishRecord]
    """The steps of training at the end, if any."""
    engine_cache: NotRequired[RoundedCacheRow]
    """With its cache in the formats that were chosen for an engine, or named."""
    combinations: NotRequired[list[CombinationRecord]]
    """The cache formats with fewer heads that were compared for that."""
    compared_recipes: NotRequired[dict[str, float]]
    """Loss increase by a short fit of each recipe that `auto` chose from."""
    mixed_moments: NotRequired[str]
    """The storage format of the mixed moments of the statistics."""
    layerwise: NotRequired[bool]
    fits: NotRequired[list[FitRecord]]
    """The local fits of a conversion layer by layer."""
    plan: Mapping[str, Any]
    plan_digest: str
    peak_memory: int
    """The most bytes that the process had resident."""
    format: NotRequired[str]
    """Format of the saved checkpoint: `stock` or `headfold`."""
    loads_in: NotRequired[list[str]]
    """Software that loads it."""
    format_note: NotRequired[str]
    padding: NotRequired[Mapping[str, Any]]
    out: str | None
    """Folder of the saved checkpoint."""
    seconds: dict[str, float]
    """Seconds by phase."""


class OriginalFacts(TypedDict):
    """The original model on the texts of a conversion or an inspection."""

    model: str
    recipe: Mapping[str, Any]
    original_loss: float
    original_perplexity: float
    calibration_data: str
    eval_data: str
    eval_documents_left_out: int
    sequence_length: int
    eval_tokens: int
    calibration_tokens: int


class ConversionFacts(OriginalFacts):
    """Fields that the conversions of one run share."""

    seed: int
    dtype: str
    kv_bytes_per_token_original: int


class ConversionRecord(ConversionFacts, ConversionPoint):
    """A conversion at one KV ratio."""


class CurveRecord(ConversionFacts):
    """Conversions at several KV ratios, from one calibration; the points by falling ratio."""

    points: list[ConversionPoint]
