"""What a finalist is worth beside its loss: tasks of lm-evaluation-harness, generated text and long contexts, beside
the original model and the baseline, and how much of that the gate lets go."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from attention.checkpoint import Checkpoint
from attention.io import checkpoint
from orchestrator import checkpoints
from orchestrator.config.schema import PromotionSection, SearchConfig
from orchestrator.evaluation.extras import Extras, ModelExtras
from orchestrator.evaluation.long_context import NUM_TEXTS
from orchestrator.evaluation.task_files import accuracy_of, task_specs
from orchestrator.evaluation.tasks import Scores
from orchestrator.promotion.state import Entry
from orchestrator.search.trials.context import TrialContext
from orchestrator.storage.json_files import read_json, write_json
from trainers.text.data import read_sequences


def extras_of(section: PromotionSection) -> Extras:
    """What is asked of finalists, as the verb `evaluate` has it."""
    lengths = ",".join(map(str, section.context_lengths)) or None
    return Extras(tuple(section.tasks), tuple(section.prompts), lengths)


def measure_finalist(entry: Entry, config: SearchConfig, context: TrialContext, promoted: Path) -> None:
    """Fill in `entry.measured` for the model that was written, and reasons if it breaks a limit of the gate. One model
    at a time is held; what the others reach is kept in `promoted` for the next finalist."""
    extras = extras_of(config.promotion)
    held_out = read_sequences(context.eval_file)[:]
    original = checkpoints.open_checkpoint(context.model, "model.path")
    positions, tokenizer = original.geometry.max_positions, checkpoints.load_tokenizer(original)
    prepared = extras.prepare(tokenizer, positions, lambda length: recut(held_out, length), config.search.seed)
    asked = hashlib.sha256(repr((extras, task_specs(extras.tasks), config.search.seed)).encode()).hexdigest()

    def of(path: str) -> ModelExtras:
        return prepared.measure(checkpoints.load_working(path, context.dtype, context.device))

    models = {"checkpoint": of(str(entry.model))}
    for name, path in (("original", context.model), ("baseline", entry.baseline_folder)):
        if path is not None:
            models[name] = _kept(promoted / f"measured-{name}.json", path, asked, of)
    entry.measured = dict(prepared.record(models))
    judge(entry, config.promotion)


def recut(held_out: Tensor, length: int) -> Tensor:
    """The first tokens of held-out text `[N, T]` as `[NUM_TEXTS, length]`; there are enough (`search.validation`)."""
    return held_out.flatten()[: NUM_TEXTS * length].view(NUM_TEXTS, length)


def _kept(file: Path, path: str, asked: str, of: Any) -> ModelExtras:
    """What a model gives, by a file of the finalist before."""
    known, key = (
        read_json(file) if file.is_file() else {},
        [checkpoint.weights_digest(Checkpoint.open(path).folder), asked],
    )
    if known.get("of") == key:
        return known["found"]
    found = of(path)
    write_json(file, {"of": key, "found": found})
    return found


def judge(entry: Entry, section: PromotionSection) -> None:
    """Reasons of a gate that has limits."""
    for name, drop in drops(entry.measured.get("tasks", {})).items():
        if (limit := section.max_task_drop) is not None and not drop <= limit:
            entry.reasons.append(f"task {name}: accuracy is {drop:.3f} below the original's, allowed are {limit:g}")
    recall = entry.measured.get("long_context", {}).get("recall", {})
    for length, depths in recall.get("original", {}).items():
        drop = mean_recall(depths) - mean_recall(recall["checkpoint"][length])
        if (limit := section.max_recall_drop) is not None and not drop <= limit:
            entry.reasons.append(
                f"context of {length}: recall is {drop:.3f} below the original's, allowed are {limit:g}"
            )


def drops(tasks: dict[str, Scores]) -> dict[str, float]:
    """By how much the accuracy of each task that has one is below the original model's."""
    found = {}
    for name, scores in tasks.get("original", {}).items():
        if metric := accuracy_of(scores):
            found[name] = scores[metric] - tasks["checkpoint"][name][metric]
    return found


def mean_recall(depths: list[dict[str, float]]) -> float:
    """Over the depths at which a line was hidden."""
    return sum(depth["recall"] for depth in depths) / len(depths)


def metrics_of(entry: Entry) -> dict[str, float]:
    """For MLflow, of the finalist: `task_NAME_METRIC` without standard errors, `recall_at_LENGTH`, the loss of the last
    positions of the longest context, and what its engine holds."""
    scores = entry.measured.get("tasks", {}).get("checkpoint", {})
    values = {f"task_{name}_{key}": value for name, found in scores.items() for key, value in found.items()}
    found = {key: v for key, v in values.items() if "_stderr" not in key and not key.endswith("_items")}
    if long := entry.measured.get("long_context"):
        found |= {f"recall_at_{length}": mean_recall(depths) for length, depths in long["recall"]["checkpoint"].items()}
        found["loss_last_positions"] = long["loss_by_position"]["checkpoint"][-1]["loss"]
    engine = ("engine_kv_bytes_per_token", "engine_capacity")
    found |= {name: float(entry.checks[name]) for name in engine if name in entry.checks}
    return {re.sub(r"[^\w./-]", "_", key): value for key, value in found.items()}  # what MLflow takes for a name


def artifacts_of(entry: Entry) -> dict[str, str]:
    """For MLflow: `tasks.json`, `generations.json`, `long_context.json`, of all models side by side."""
    return {f"{name}.json": json.dumps(found, indent=1, sort_keys=True) for name, found in entry.measured.items()}
