"""Content of `promotion.json` and of the `lineage.json` of a promoted checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict


class LossComparison(TypedDict):
    """The losses that a promotion compares with `loss`, and the steps of best models."""

    untrained_loss: float | None
    last_loss: float | None
    baseline_loss: float | None
    original_loss: float | None
    best_step: int | None
    baseline_step: int | None


class GateChecks(TypedDict, total=False):
    """The measurements of the gate. Losses are held out, in nats per token."""

    loss: float | None
    untrained_loss: float | None
    last_loss: float | None
    baseline_loss: float | None
    original_loss: float | None
    best_step: int | None
    baseline_step: int | None
    shipped: str | None
    margin: float
    margin_standard_errors: float
    test_loss: float
    """On the gate's own text, as the next three."""
    baseline_test_loss: float
    untrained_test_loss: float
    original_test_loss: float
    test_tokens: int
    test_documents: int
    test_digest: str
    loss_difference: float
    """Difference of the baseline's loss and the candidate's on that text."""
    loss_difference_stderr: float | None
    """By a paired bootstrap over documents; None for a single one."""
    loss_difference_interval: list[float | None]
    """The 95 % interval."""
    warning: str
    """What makes the comparison incomplete."""
    kv_bytes_per_token: int
    """Bytes by the plan, in the dtype of the exported weights."""
    baseline_kv_bytes_per_token: int
    """Likewise of the baseline, which may have no plan of as many."""
    cache_bytes_measured: int
    """Bytes of a cache that was filled with `cache_tokens` tokens."""
    cache_tokens: int
    export: str
    exact: bool
    exported_loss: float
    max_logit_difference: float
    logit_noise: float
    """Change of the trained model's logits by another order of the sums, in float32."""
    logit_tolerance: float
    target: str
    engine: str
    """The engine that has loaded the export, or why none has."""
    engine_kv_heads: list[int]
    engine_version: str
    engine_kv_bytes_per_token: float
    engine_kv_bytes_per_token_promised: float
    engine_capacity: int
    engine_memory: int


class LongContextScores(TypedDict):
    """Scores by model: `checkpoint`, `original`, `baseline`."""

    loss_by_position: dict[str, list[dict[str, float]]]
    recall: dict[str, dict[str, list[dict[str, float]]]]
    """For each context length, at each depth of the hidden line."""


class FinalistScores(TypedDict, total=False):
    """Measurements other than the loss, of the finalist, the original model and the baseline."""

    tasks: dict[str, dict[str, dict[str, float]]]
    """Metrics by model and task."""
    generations: list[dict[str, Any]]
    long_context: LongContextScores


class ModelOrigin(TypedDict):
    """The original model of a search."""

    path: str
    weights_digest: str | None
    calibration_digest: str | None
    loss: float


class SearchOrigin(TypedDict):
    """The search; `run` is the id of its MLflow run."""

    name: str
    folder: str
    run: str | None
    config_digest: str | None
    versions_digest: str | None


class TrialOrigin(TypedDict):
    """The trial; `run` is the id of its MLflow run."""

    id: str
    run: str | None
    recipe: str
    recipe_digest: str | None
    learning_rate: float
    seed: int | None


class PlanOrigin(TypedDict):
    """The attention plan."""

    digest: str | None
    kv_ratio: float


class DataOrigin(TypedDict):
    """The training text, and how far the shipped weights have read it."""

    source: str
    digest: str | None
    sequence_length: int
    steps: int | None
    position: int | None
    """In sequences."""


class WeightDigests(TypedDict):
    """Digests of the weights before and after the export."""

    trained: str | None
    exported: str | None


class PromotionOrigin(TypedDict):
    """The MLflow run of the promotion."""

    run: str | None


class LineageRecord(TypedDict):
    """The origin of a promoted checkpoint, by names and digests: `lineage.json`."""

    model: ModelOrigin
    search: SearchOrigin
    trial: TrialOrigin
    plan: PlanOrigin
    data: DataOrigin
    checkpoint: WeightDigests
    promotion: PromotionOrigin


class EntryRecord(TypedDict):
    """One trial in a promotion (`orchestrator.promotion.state.PromotionEntry`)."""

    trial_id: str
    recipe: str
    kv_ratio: float
    steps: int
    role: str
    status: str
    loss: float | None
    kl: float | None
    best_step: int | None
    shipped: str | None
    last_loss: float | None
    untrained_loss: float | None
    baseline_loss: float | None
    baseline_step: int | None
    baseline_folder: str | None
    original_loss: float | None
    folder: str | None
    data_position: int | None
    model: str | None
    exported: str | None
    served: str | None
    plain: bool
    kv_bytes_per_token: int | None
    gate: dict[str, str]
    checks: GateChecks
    measured: FinalistScores
    reasons: list[str]
    gate_settings: NotRequired[Mapping[str, Any]]
    """The settings of `promotion` by which the gate has decided."""
    trained_tokens: NotRequired[int]
    """Tokens that the shipped weights were trained on."""
    lineage: Mapping[str, Any]
    """A LineageRecord; empty before the gate."""
    version: str | None
    model_uri: str | None
    run_id: str | None
    trained_at: float | None
    offset: NotRequired[int]
    name: str
    label: str
    relaxation_remaining: float | None
    used_kv_ratio: float | None


class PromotionRecord(TypedDict):
    """The content of `promotion.json`."""

    candidates: dict[str, EntryRecord]
    """Entries by trial id."""
    baselines: dict[str, EntryRecord]
    """Entries by KV ratio."""
    exported: str | None
    """The promoted checkpoint of the smallest cache that stock transformers loads."""
    earlier: list[EntryRecord]
    """Entries that a later promotion of the same trial has replaced."""
    failed: list[str]
    """Ids of trials with a step that another run of the promotion may carry out."""
