"""The configuration of a search whose trials take seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.config.schema import SearchConfig, parse_config


def small_search(model: Path, storage: Path | str, **changes: Any) -> SearchConfig:
    """`changes`: sections whose keys take the place of those here, and other values by their key."""
    record: dict[str, Any] = {
        "name": "small",
        "model": {"path": str(model)},
        "data": {
            "sequence_length": 64,
            "train": {"tokens": 16384},
            "eval": {"tokens": 2048},
            "calibration": {"tokens": 2048},
        },
        "search": {"searcher": "grid", "recipes": ["gqa", "asymgqa"], "kv_ratios": [0.5]},
        "rungs": {"steps": [0, 1, 2]},
        "train": {"batch_size": 2, "cpus_per_worker": 0.95},
        "promotion": {"steps": 3},
        "resources": {"max_concurrent": 1, "tokens_per_second": 1000},
        "storage": str(storage),
    }
    for name, change in changes.items():
        record[name] = {**record.get(name, {}), **change} if isinstance(change, dict) else change
    return parse_config(record)
