"""A search whose storage is a bucket: workers store training checkpoints there, and a promotion resumes from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import ray
from buckets import bucket
from small_searches import small_search

from orchestrator.pipeline import search
from orchestrator.storage.journal import load_trials
from orchestrator.storage.mirror import mirrored, open_address
from orchestrator.storage.paths import SearchFolder
from trainers.jobs.checkpoints import CheckpointStore
from trainers.jobs.curve import read_curve


@pytest.mark.extended
def test_checkpoints_are_in_the_bucket_alone(tmp_path: Path, demo_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADFOLD_HOME", str(tmp_path / "home"))
    ray.shutdown()  # workers of a Ray that is there would not know the credentials
    with bucket(monkeypatch) as address:
        config = small_search(
            demo_dir,
            address,
            name="remote",
            rungs={"stop": False},
            promotion={"evaluations": 1, "checkpoint_steps": 1},
        )
        outcome = search(config)
        folder = SearchFolder.existing(outcome.folder)
        assert folder.address == address
        filesystem, root = open_address(address)
        index: dict[str, Any] = {}
        for trial in load_trials(folder.root):
            place = f"{root}/remote/train/{trial.trial_id}/checkpoints.json"
            with filesystem.open_input_stream(place) as stream:
                index[trial.recipe] = json.loads(stream.read())
            (kept,) = index[trial.recipe]["checkpoints"]
            assert kept["step"] == trial.step == 2
            assert trial.last["checkpoint_path"] == str(folder.train / trial.trial_id / "checkpoint_000002")
        assert not [p for p in folder.root.rglob("*") if p.name.startswith("checkpoint_") or p.suffix == ".pt"]
        (candidate,) = outcome.promotion["candidates"].values()
        assert candidate["status"] in ("promoted", "refused") and candidate["steps"] == 5, candidate
        # It resumed from the trial's checkpoint: a fresh optimiser would have begun with the trial's weights
        curve = read_curve(folder.train / f"promote-{candidate['trial_id']}-5")
        assert curve[0]["step"] == 3
        # A new, empty head: the checkpoint that workers resume from is fetched by them and not by the driver
        shutil.rmtree(folder.storage)
        with mirrored(address, folder.storage):
            assert load_trials(folder.root) and folder.address == address
            assert not list(folder.root.rglob("*.pt"))
            store = CheckpointStore(str(folder.train), candidate["trial_id"], address=folder.train_address)
            newest, reports, damage = store.newest_whole()
            assert newest is not None and (newest.step, [r["step"] for r in reports], damage) == (2, [1, 2], [])
            assert list(store.folder(newest).rglob("*.pt"))
            store.release()
