"""The scores of a finalist other than its loss, and the limits that the gate has for them.

Tasks of lm-evaluation-harness, generated text and long contexts, of the finalist, the original
model and the baseline.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from attention.checkpoint import Checkpoint
from attention.io import checkpoint
from orchestrator import checkpoints
from orchestrator.config.schema import PromotionSection, SearchConfig
from orchestrator.evaluation.extras import Extras, ModelExtras
from orchestrator.evaluation.long_context import NUM_TEXTS
from orchestrator.evaluation.task_files import (
    ACCURACIES,
    accuracies_of,
    data_digests,
    task_specs,
)
from orchestrator.evaluation.tasks import Scores
from orchestrator.promotion.state import GateRecord
from orchestrator.search.trials.context import TrialContext
from orchestrator.storage.json_files import read_json, write_json
from orchestrator.storage.promotion_record import FinalistScores
from trainers.text.data import read_sequences
from trainers.text.tokenising import beginning


def extras_of(section: PromotionSection) -> Extras:
    """Return the measurements of finalists, as the verb `evaluate` names them."""
    lengths = ",".join(map(str, section.context_lengths)) or None
    return Extras(tuple(section.tasks), tuple(section.prompts), lengths)


def score_finalist(
    model: str,
    baseline: str | None,
    config: SearchConfig,
    context: TrialContext,
    cache_folder: Path,
) -> FinalistScores:
    """Measure an exported model, the original and the baseline; one at a time is in memory.

    Args:
        baseline: The weights of the baseline at the same KV ratio, if there are any.
        cache_folder: Keeps the scores of the other two for the next finalist.
    """
    measurement = _Measurement(config, context)
    scores = {
        "checkpoint": measurement.of(model),
        "original": measurement.cached(context.model, cache_folder),
    }
    if baseline is not None:
        scores["baseline"] = measurement.cached(baseline, cache_folder)
    return cast(FinalistScores, measurement.prepared.record(scores))


def score_reference(
    path: str, config: SearchConfig, context: TrialContext, cache_folder: Path
) -> None:
    """Measure the original model or a baseline, for the finalists that are compared with it."""
    _Measurement(config, context).cached(path, cache_folder)


class _Measurement:
    """Measurements of finalists, of the original model and of baselines."""

    def __init__(self, config: SearchConfig, context: TrialContext) -> None:
        extras = extras_of(config.promotion)
        seed = config.search.seed
        text = read_sequences(context.eval_file)
        held_out = text[:]
        original = checkpoints.open_checkpoint(context.model, "model.path")
        tokenizer = checkpoints.load_tokenizer(original)
        first = beginning(tokenizer)
        self._context = context
        self.prepared = extras.prepare(
            tokenizer,
            original.geometry.max_positions,
            lambda length: _recut(held_out, length, first),
            seed,
        )
        specs = task_specs(extras.tasks)
        request = repr((extras, specs, data_digests(specs), text.digest, seed, first))
        self._digest = hashlib.sha256(request.encode()).hexdigest()

    def of(self, path: str) -> ModelExtras:
        """Measure a checkpoint."""
        context = self._context
        return self.prepared.measure(checkpoints.load_working(path, context.dtype, context.device))

    def cached(self, path: str, folder: Path) -> ModelExtras:
        """Return the scores of the original model or of a baseline, which a file keeps.

        They are measured if they are not of the same weights and request.
        """
        name = "original"
        if path != self._context.model:
            name = f"baseline-{hashlib.sha256(path.encode()).hexdigest()[:12]}"
        file = folder / f"measured-{name}.json"
        key = [checkpoint.weights_digest(Checkpoint.open(path).folder), self._digest]
        if file.is_file():
            record = read_json(file)
            if record.get("of") == key:
                return record["found"]
        scores = self.of(path)
        write_json(file, {"of": key, "found": scores})
        return scores


def _recut(held_out: Tensor, length: int, first: Sequence[int]) -> Tensor:
    """Return the first tokens of held-out text `[N, T]` as `[NUM_TEXTS, length]`.

    There are enough: `orchestrator.search.validation` has counted them. Each row begins with the
    tokens `first`, as each sequence of the text does.
    """
    rows = held_out.flatten()[: NUM_TEXTS * length].view(NUM_TEXTS, length).clone()
    rows[:, : len(first)] = torch.tensor(first, dtype=rows.dtype)
    return rows


def limit_violations(scores: FinalistScores, section: PromotionSection) -> list[str]:
    """Return a reason for each limit of the gate that is exceeded."""
    reasons = []
    if section.max_task_drop is not None:
        reasons += _task_drops(scores.get("tasks", {}), section.max_task_drop)
    recall = scores["long_context"]["recall"] if "long_context" in scores else {}
    for length, depths in recall.get("original", {}).items():
        drop = _mean_recall(depths) - _mean_recall(recall["checkpoint"][length])
        if (limit := section.max_recall_drop) is not None and not drop <= limit:
            reasons.append(
                f"context of {length}: recall is {drop:.3f} below the original's, allowed are "
                f"{limit:g}"
            )
    return reasons


def _task_drops(tasks: Mapping[str, Scores], limit: float) -> list[str]:
    """Return a reason for each accuracy that is too far below the original's."""
    reasons = []
    for name, scores in tasks.get("original", {}).items():
        for metric in accuracies_of(scores):
            drop = scores[metric] - tasks["checkpoint"][name].get(metric, math.nan)
            if not drop <= limit:
                task = name if metric in ACCURACIES else f"{name}, {metric}"
                reasons.append(
                    f"task {task}: accuracy is {drop:.3f} below the original's, allowed are "
                    f"{limit:g}"
                )
    return reasons


def _mean_recall(depths: list[dict[str, float]]) -> float:
    """Return the mean over the depths at which a line was hidden."""
    return sum(depth["recall"] for depth in depths) / len(depths)


_METRICS = (
    "engine_kv_bytes_per_token",
    "engine_capacity",
    "test_loss",
    "baseline_test_loss",
    "untrained_test_loss",
    "original_test_loss",
    "loss_difference",
    "loss_difference_stderr",
)


def metrics_of(gate: GateRecord) -> dict[str, float]:
    """Return what MLflow shows of a finalist as metrics.

    They are `task_NAME_METRIC` without standard errors, `recall_at_LENGTH`, the loss at the last
    positions of the longest context, the engine's bytes per token and capacity, and the losses on
    the gate's own text.
    """
    metrics: dict[str, float] = {}
    for task, scores in gate.scores.get("tasks", {}).get("checkpoint", {}).items():
        for key, value in scores.items():
            name = f"task_{task}_{key}"
            if "_stderr" not in name and not name.endswith("_items"):
                metrics[name] = value
    if "long_context" in gate.scores:
        long_context = gate.scores["long_context"]
        for length, depths in long_context["recall"]["checkpoint"].items():
            metrics[f"recall_at_{length}"] = _mean_recall(depths)
        metrics["loss_last_positions"] = long_context["loss_by_position"]["checkpoint"][-1]["loss"]
    for name in _METRICS:
        if (value := gate.checks.get(name)) is not None:
            metrics[name] = float(value)
    # MLflow takes no other characters in names
    return {re.sub(r"[^\w./-]", "_", key): value for key, value in metrics.items()}


def artifacts_of(gate: GateRecord) -> dict[str, str]:
    """Return `tasks.json`, `generations.json` and `long_context.json`, of all models."""
    return {
        f"{name}.json": json.dumps(scores, indent=1, sort_keys=True)
        for name, scores in gate.scores.items()
    }
