"""What MLflow is to hold of the trials of a search, and of all its runs."""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from attention.ratios import percent
from orchestrator.config.schema import SearchConfig
from orchestrator.storage import records
from orchestrator.storage.json_files import read_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord
from orchestrator.tracking.metrics import METRICS, point
from orchestrator.tracking.runs import Dataset
from orchestrator.tracking.sync import SharedMetadata, TrackedRun
from search_spaces.recipes.recipe import AXES
from trainers.text.data import SPLITS
from trainers.text.token_sets import is_complete, read_sequences

DIGITS = 16
"""Hexadecimal digits of a dataset's digest; MLflow takes 36."""
NOTE = "mlflow.note.content"
FACTS = (
    *("kv_bytes_per_token", "cache_bytes_measured", "parameters", "actual_kv_ratio", "decode_seconds_per_token"),
    "calibration_loss",
)
"""Of a trial's record, what goes to its first point."""


def shared_metadata(
    config: SearchConfig, folder: SearchFolder, files: Mapping[str, Path], base_model: str | None
) -> SharedMetadata:
    """Of all runs of a search. `files`: its token sets, by split; `base_model`: what the original is called."""
    tags = source_tags("search", read_json(folder.state).get("command", "headfold search"))
    if version := read_json(folder.versions).get("headfold"):
        tags["headfold.version"] = version
    params = {"base_model": base_model, "batch_size": config.train.batch_size, "seed": config.search.seed}
    return SharedMetadata(tags, params, datasets_of(config, {split: files[split] for split in SPLITS}))


def source_tags(verb: str, command: str) -> dict[str, str]:
    """Who made a run, and with what."""
    # The page shows what follows the last / of a source, as if it were a file
    tags = {"mlflow.source.name": f"headfold {verb}", "mlflow.source.type": "LOCAL", "headfold.command": command}
    with contextlib.suppress(OSError, KeyError, ImportError):  # a user id without a name, as in a container
        tags["mlflow.user"] = getpass.getuser()
    return tags


def search_note(config: SearchConfig, folder: SearchFolder) -> str:
    """The description of the run of a search."""
    search, model = config.search, Path(config.model.path).name
    recipes = ", ".join(arm.name for arm in search.recipes)
    sizes = [percent(ratio) for ratio in search.kv_ratios] or [f"{heads} KV heads" for heads in search.kv_heads]
    what = f"Search `{folder.root.name}` on `{model}`: {recipes} at {', '.join(sizes)} of the checkpoint's KV cache"
    below = "Each trial and each promotion is a run below it; loss over KV bytes of all:"
    return f"{what}.\n\n{below} `headfold ui {folder.root}`"


def dataset_of(split: str, source: str, file: Path | str) -> Dataset:
    """A text that is tokenised in `file`."""
    text = read_sequences(file)
    rows, length = text.shape
    return Dataset(split, source, text.digest[:DIGITS], rows * length, length)


def datasets_of(config: SearchConfig, files: Mapping[str, Path | str], promotion: bool = False) -> list[Dataset]:
    """The texts of a run, as far as they are tokenised. `files`: token sets by train, eval and calibration; of a
    `promotion` that for training may be its own."""
    found = []
    for split, file in files.items():
        if is_complete(file):
            source = config.data.section(split)[0]
            if promotion and split == "train" and (fresh := config.promotion.data) is not None:
                source = fresh.source or config.data.source
            found.append(dataset_of(split, source, file))
    return found


def trial_run(record: TrialRecord, folder: Path) -> TrackedRun:
    """Of a trial of the search in `folder`."""
    tags: dict[str, Any] = {"trial_id": record.trial_id, "headfold.kind": "trial", NOTE: _note(record, folder)}
    if record.status not in (records.RUNNING, records.WAITING):
        ended = {"headfold.status": record.status, "error": record.error, "copy_of": record.copy_of}
        tags |= {name: value for name, value in ended.items() if value is not None}
    points, files = [], []
    for place, rung in enumerate(record.rungs):
        values = {key: value for key, value in rung.items() if key in METRICS and not key.startswith("best_")}
        if place == 0:
            tags["plan_digest"] = record.plan_digest
            means = (record.similarity or {}).get("means", {})
            values |= {name: getattr(record, name) for name in FACTS}
            values |= {f"similarity_{k}": value for k, value in means.items()}
            files = [folder / "trials" / record.trial_id / name for name in ("plan.json", "recipe.json")]
        if record.relaxation_remaining is not None and place == len(record.rungs) - 1:
            values["relaxation_remaining"] = record.relaxation_remaining
            tags["headfold.relaxation"] = "unfinished" if record.relaxation_unfinished else "finished"
        if place == 1 and record.relaxation:
            values["remaining_distance"] = record.remaining_distance
            for one in record.relaxation:
                measured = {f"relaxation_{key}": value for key, value in one.items() if key != "step"}
                points.append(point(measured, one["step"], rung["timestamp"]))
        points.append(point(values, rung["step"], rung["timestamp"]))
    run = TrackedRun(record.name, tags, record.status, trial_params(record), points, {}, files)
    return replace(run, started=record.started, ended=record.ended)


def trial_params(record: TrialRecord) -> dict[str, Any]:
    """Of a trial, and of its promotion."""
    params = {"recipe": record.label, "kv_ratio": record.kv_ratio, "learning_rate": record.learning_rate}
    found = {"seed": record.seed, "actual_kv_ratio": record.actual_kv_ratio}
    known = {name: value for name, value in found.items() if value is not None}
    return params | known | {"choices": record.choices}


def _note(record: TrialRecord, folder: Path) -> str:
    parts = {axis: record.choices.get(axis) for axis in AXES}
    told = ", ".join(f"{axis} {part}" for axis, part in parts.items() if part not in (None, "none"))
    what = f"Trial `{record.trial_id}` of search `{folder.name}`: {record.label} at {percent(record.kv_ratio)}"
    return f"{what} of the checkpoint's KV cache.\n\n{told}"
