"""Tags, params, datasets and series of the runs of a search, from its records."""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention.ratios import percent
from orchestrator.config.schema import SearchConfig
from orchestrator.storage import records
from orchestrator.storage.json_files import read_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord
from orchestrator.tracking.metrics import METRICS, point
from orchestrator.tracking.runs import NOTE, Dataset
from orchestrator.tracking.sync import SharedMetadata, TrackedRun
from search_spaces.recipes.recipe import AXES
from trainers.text.data import SPLITS
from trainers.text.token_sets import is_complete, read_sequences

_DIGITS = 16
"""Hexadecimal digits of a dataset's digest; MLflow takes 36."""
_MODEL_METRICS = (
    "kv_bytes_per_token_per_gpu",
    "cache_bytes_measured",
    "parameters",
    "actual_kv_ratio",
    "decode_seconds_per_token",
)
"""Fields of a trial's record that its first point has."""


def shared_metadata(
    config: SearchConfig, folder: SearchFolder, files: Mapping[str, Path], base_model: str | None
) -> SharedMetadata:
    """Return the metadata that all runs of a search share.

    Args:
        config: Configuration of the search.
        folder: Folder of the search.
        files: Its token sets, by split.
        base_model: Name of the original model.
    """
    tags = source_tags("search", read_json(folder.state).get("command", "headfold search"))
    if version := read_json(folder.versions).get("headfold"):
        tags["headfold.version"] = version
    params = {
        "base_model": base_model,
        "batch_size": config.train.batch_size,
        "seed": config.search.seed,
    }
    return SharedMetadata(
        tags, params, datasets_of(config, {split: files[split] for split in SPLITS})
    )


def source_tags(verb: str, command: str) -> dict[str, str]:
    """Return the tags that name the program and the user of a run."""
    tags = {
        "mlflow.source.name": f"headfold {verb}",  # a / would show only what follows it
        "mlflow.source.type": "LOCAL",
        "headfold.command": command,
    }
    with contextlib.suppress(OSError, KeyError, ImportError):  # a user id without a name
        tags["mlflow.user"] = getpass.getuser()
    return tags


def search_note(config: SearchConfig, folder: SearchFolder) -> str:
    """Return the description of the run of a search."""
    search = config.search
    recipes = ", ".join(arm.name for arm in search.recipes)
    sizes = [percent(ratio) for ratio in search.kv_ratios]
    if not sizes:
        sizes = [f"{heads} KV heads" for heads in search.kv_heads]
    return (
        f"Search `{folder.root.name}` on `{Path(config.model.path).name}`: {recipes} at "
        f"{', '.join(sizes)} of the KV cache.\n\n"
        "Trials and promotions are child runs. Tables and figures: artifact `report.html`, or "
        f"`{folder.report}`. Charts: `headfold ui {folder.root}`"
    )


def dataset_of(split: str, source: str, file: Path | str) -> Dataset:
    """Return the dataset of a text that is tokenised in `file`."""
    text = read_sequences(file)
    rows, length = text.shape
    return Dataset(split, source, text.digest[:_DIGITS], rows * length, length)


def datasets_of(
    config: SearchConfig, files: Mapping[str, Path | str], promotion: bool = False
) -> list[Dataset]:
    """Return the texts of a run, as far as they are tokenised.

    Args:
        config: Of the search.
        files: Token sets by split: train, eval and calibration.
        promotion: Whether the run is a promotion, which may have its own training text.
    """
    datasets = []
    for split, file in files.items():
        if is_complete(file):
            source = config.data.section(split)[0]
            if promotion and split == "train":
                source = config.promotion_source
            datasets.append(dataset_of(split, source, file))
    return datasets


def trial_run(record: TrialRecord, folder: Path) -> TrackedRun:
    """Return the run of a trial of the search in `folder`."""
    run = TrackedRun(
        record.name,
        {"trial_id": record.trial_id, "headfold.kind": "trial", NOTE: _trial_note(record, folder)},
        record.status,
        trial_params(record),
        started=record.started,
        ended=record.ended,
    )
    if record.status not in (records.RUNNING, records.WAITING):
        run.tags["headfold.status"] = record.status
        if record.error is not None:
            run.tags["error"] = record.error
        if record.copy_of is not None:
            run.tags["copy_of"] = record.copy_of
    for index, rung in enumerate(record.rungs):
        values = {
            key: value
            for key, value in rung.items()
            if key in METRICS and not key.startswith("best_")
        }
        if index == 0:
            run.tags["plan_digest"] = record.plan_digest
            values |= {name: getattr(record, name) for name in _MODEL_METRICS}
            means = (record.similarity or {}).get("means", {})
            values |= {f"similarity_{name}": value for name, value in means.items()}
            trial_folder = folder / "trials" / record.trial_id
            run.files = [trial_folder / "plan.json", trial_folder / "recipe.json"]
        if record.relaxation_remaining is not None and index == len(record.rungs) - 1:
            values["relaxation_remaining"] = record.relaxation_remaining
            state = "unfinished" if record.relaxation_unfinished else "finished"
            run.tags["headfold.relaxation"] = state
        if index == 1 and record.relaxation:
            values["remaining_distance"] = record.remaining_distance
            for entry in record.relaxation:
                measured = {f"relaxation_{key}": entry[key] for key in entry if key != "step"}
                run.points.append(point(measured, entry["step"], rung["timestamp"]))
        # At each rung: MLflow's chart over a metric joins two metrics by their steps
        values["kv_bytes_per_token"] = record.kv_bytes_per_token
        run.points.append(point(values, rung["step"], rung["timestamp"]))
    return run


def trial_params(record: TrialRecord) -> dict[str, Any]:
    """Return the params of a trial, and of its promotion."""
    params: dict[str, Any] = {
        "recipe": record.label,
        "kv_ratio": record.kv_ratio,
        "learning_rate": record.learning_rate,
    }
    if record.seed is not None:
        params["seed"] = record.seed
    if record.actual_kv_ratio is not None:
        params["actual_kv_ratio"] = record.actual_kv_ratio
    return params | {"choices": record.choices}


def _trial_note(record: TrialRecord, folder: Path) -> str:
    parts = {axis: record.choices.get(axis) for axis in AXES}
    choices = [f"{axis} {part}" for axis, part in parts.items() if part not in (None, "none")]
    return (
        f"Trial `{record.trial_id}` of search `{folder.name}`: {record.label}, "
        f"KV ratio {percent(record.kv_ratio)}.\n\n{', '.join(choices)}"
    )
