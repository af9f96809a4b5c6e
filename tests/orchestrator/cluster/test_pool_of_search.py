"""Which searches keep their workers from training to training."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from orchestrator.cluster import pool_client
from orchestrator.cluster.pool_client import REUSED_BELOW, pool_of_search
from orchestrator.config.schema import SearchConfig
from orchestrator.storage.paths import SearchFolder


@pytest.mark.parametrize(
    ("reuse", "gpus", "parameters", "kept"),
    [
        ("auto", 0, 10 * REUSED_BELOW, True),
        ("auto", 1, REUSED_BELOW - 1, True),
        ("auto", 1, REUSED_BELOW, False),
        (True, 1, REUSED_BELOW, True),
        (False, 0, 1, False),
    ],
)
def test_workers_of_large_models_on_gpus_are_kept_only_if_requested(
    reuse: str | bool, gpus: int, parameters: int, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_client, "open_pool", lambda storage_path, **seconds: nullcontext("pool"))
    sections = {"train": {"gpus_per_worker": gpus}, "resources": {"reuse_workers": reuse}}
    record = {"name": "x", "model": {"path": "none"}, "search": {"kv_ratios": [0.5]}, **sections}
    with pool_of_search(SearchConfig.model_validate(record), SearchFolder(tmp_path), parameters) as pool:
        assert pool == ("pool" if kept else None)
