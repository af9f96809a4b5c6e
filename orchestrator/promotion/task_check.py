"""Tasks of lm-evaluation-harness in a promotion: what a finalist reaches, what the original model does, and how much
of that the gate lets go."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from orchestrator.config.schema import SearchConfig
from orchestrator.conversion import loading
from orchestrator.evaluation.task_files import accuracy_of, task_specs
from orchestrator.evaluation.tasks import HarnessTasks, Scores
from orchestrator.promotion.state import Entry
from orchestrator.search.trial import TrialContext
from orchestrator.storage.records import read_json, write_json

TASKS = "tasks.json"
"""The artifact with all scores."""
ORIGINAL = "original-tasks.json"


def check_tasks(entry: Entry, config: SearchConfig, context: TrialContext, promoted: Path) -> None:
    """Fill in `entry.tasks` for the model that was written, and reasons if the gate has a limit that it breaks. One
    model at a time is held; the original's scores are kept in `promoted` for the next finalist."""
    tasks = HarnessTasks(config.promotion.tasks)
    tokenizer = loading.load_tokenizer(context.model)

    def scores_of(path: str) -> Scores:
        return tasks.scores(loading.load_working(path, context.dtype, context.device), tokenizer)

    entry.tasks = {
        "checkpoint": scores_of(str(entry.model)),
        "original": _original(promoted, config, context, scores_of),
    }
    limit = config.promotion.max_task_drop
    for name, drop in drops(entry.tasks).items():
        if limit is not None and not drop <= limit:
            entry.reasons.append(f"task {name}: accuracy is {drop:.3f} below the original's, allowed are {limit:g}")


def _original(promoted: Path, config: SearchConfig, context: TrialContext, scores_of: Any) -> Scores:
    specs = hashlib.sha256(repr(task_specs(config.promotion.tasks)).encode()).hexdigest()
    key = {"model": context.model, "weights": context.weights, "tasks": specs}
    file = promoted / ORIGINAL
    known = read_json(file) if file.is_file() else {}
    if known.get("of") == key:
        return known["scores"]
    scores = scores_of(context.model)
    write_json(file, {"of": key, "scores": scores})
    return scores


def drops(tasks: dict[str, Scores]) -> dict[str, float]:
    """By how much the accuracy of each task that has one is below the original model's."""
    found = {}
    for name, scores in tasks.get("original", {}).items():
        if metric := accuracy_of(scores):
            found[name] = scores[metric] - tasks["checkpoint"][name][metric]
    return found


def task_metrics(tasks: dict[str, Scores]) -> dict[str, float]:
    """For MLflow: `task_NAME_METRIC` of the finalist, its standard errors left out."""
    scores = tasks.get("checkpoint", {})
    values = [(f"task_{name}_{key}", value) for name, found in scores.items() for key, value in found.items()]
    wanted = [(key, value) for key, value in values if "_stderr" not in key and not key.endswith("_items")]
    return {re.sub(r"[^\w./-]", "_", key): value for key, value in wanted}  # what MLflow takes for a name
