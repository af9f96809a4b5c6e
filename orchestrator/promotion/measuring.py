"""The scores of a finalist beside its loss, and the limits that the gate has for them.

Tasks of lm-evaluation-harness, generated text and long contexts, of the finalist, the original
model and the baseline.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from torch import Tensor

from attention.checkpoint import Checkpoint
from attention.io import checkpoint
from orchestrator import checkpoints
from orchestrator.config.schema import PromotionSection, SearchConfig
from orchestrator.evaluation.extras import Extras, ModelExtras
from orchestrator.evaluation.long_context import NUM_TEXTS
from orchestrator.evaluation.task_files import accuracy_of, task_specs
from orchestrator.evaluation.tasks import Scores
from orchestrator.promotion.state import GateRecord
from orchestrator.search.trials.context import TrialContext
from orchestrator.storage.json_files import read_json, write_json
from orchestrator.storage.promotion_record import FinalistScores
from trainers.text.data import read_sequences


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
    extras = extras_of(config.promotion)
    seed = config.search.seed
    held_out = read_sequences(context.eval_file)[:]
    original = checkpoints.open_checkpoint(context.model, "model.path")
    prepared = extras.prepare(
        checkpoints.load_tokenizer(original),
        original.geometry.max_positions,
        lambda length: _recut(held_out, length),
        seed,
    )
    request = repr((extras, task_specs(extras.tasks), seed))
    request_digest = hashlib.sha256(request.encode()).hexdigest()

    def measure(path: str) -> ModelExtras:
        return prepared.measure(checkpoints.load_working(path, context.dtype, context.device))

    scores = {"checkpoint": measure(model)}
    for name, path in (("original", context.model), ("baseline", baseline)):
        if path is not None:
            file = cache_folder / f"measured-{name}.json"
            scores[name] = _cached(file, path, request_digest, measure)
    return cast(FinalistScores, prepared.record(scores))


def _recut(held_out: Tensor, length: int) -> Tensor:
    """Return the first tokens of held-out text `[N, T]` as `[NUM_TEXTS, length]`.

    There are enough: `orchestrator.search.validation` has counted them.
    """
    return held_out.flatten()[: NUM_TEXTS * length].view(NUM_TEXTS, length)


def _cached(
    file: Path, path: str, request_digest: str, measure: Callable[[str], ModelExtras]
) -> ModelExtras:
    """Return the scores of a model, from a file if they are of the same weights and request."""
    key = [checkpoint.weights_digest(Checkpoint.open(path).folder), request_digest]
    if file.is_file():
        record = read_json(file)
        if record.get("of") == key:
            return record["found"]
    scores = measure(path)
    write_json(file, {"of": key, "found": scores})
    return scores


def limit_violations(scores: FinalistScores, section: PromotionSection) -> list[str]:
    """Return a reason for each limit of the gate that is exceeded."""
    reasons = []
    for name, drop in _accuracy_drops(scores.get("tasks", {})).items():
        if (limit := section.max_task_drop) is not None and not drop <= limit:
            reasons.append(
                f"task {name}: accuracy is {drop:.3f} below the original's, allowed are {limit:g}"
            )
    recall = scores["long_context"]["recall"] if "long_context" in scores else {}
    for length, depths in recall.get("original", {}).items():
        drop = _mean_recall(depths) - _mean_recall(recall["checkpoint"][length])
        if (limit := section.max_recall_drop) is not None and not drop <= limit:
            reasons.append(
                f"context of {length}: recall is {drop:.3f} below the original's, allowed are "
                f"{limit:g}"
            )
    return reasons


def _accuracy_drops(tasks: Mapping[str, Scores]) -> dict[str, float]:
    """Return how far each task that has an accuracy is below the original model."""
    drops = {}
    for name, scores in tasks.get("original", {}).items():
        if metric := accuracy_of(scores):
            drops[name] = scores[metric] - tasks["checkpoint"][name][metric]
    return drops


def _mean_recall(depths: list[dict[str, float]]) -> float:
    """Return the mean over the depths at which a line was hidden."""
    return sum(depth["recall"] for depth in depths) / len(depths)


def metrics_of(gate: GateRecord) -> dict[str, float]:
    """Return what MLflow shows of a finalist as metrics.

    They are `task_NAME_METRIC` without standard errors, `recall_at_LENGTH`, the loss at the last
    positions of the longest context, and the engine's bytes per token and capacity.
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
    for name in ("engine_kv_bytes_per_token", "engine_capacity"):
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
