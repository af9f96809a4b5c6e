"""The estimated disk of a search: it is not exceeded, and a search that cannot fit does not begin."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_searches import small_search

from attention.io import checkpoint
from orchestrator.cluster.capacity import Nodes
from orchestrator.config.schema import ConfigError, SearchConfig
from orchestrator.pipeline import search
from orchestrator.promotion.promote import promote_search
from orchestrator.resources.disk import Storage, checkpoint_bytes
from orchestrator.resources.size import Size
from orchestrator.search.setup import SearchSetup
from orchestrator.storage.journal import load_trials
from trainers.engine import TrainEngine
from trainers.losses import objective
from trainers.settings import TrainSettings
from trainers.zero import group_of_one, load_trainable


def config_of(demo_dir: Path, storage: Path, **sections: Any) -> SearchConfig:
    """Four trials of three trained rungs, and a promotion that is measured three times."""
    own: dict[str, Any] = {
        "search": {"learning_rates": [1e-3, 1e-4]},
        "rungs": {"steps": [0, 1, 2, 3]},
        "promotion": {"evaluations": 3},
    }
    own |= {name: own.get(name, {}) | section for name, section in sections.items()}
    return small_search(demo_dir, storage, **own)


def storage_of(config: SearchConfig) -> Storage:
    setup = SearchSetup.open(config, weights=False)
    return Storage.of(setup.inputs, setup.work.trials, trainings=2)


@contextmanager
def sampled(folder: Path) -> Iterator[list[int]]:
    """The bytes of all files in a folder, many times per second, and once more in the end."""
    over, seen = threading.Event(), [0]

    def look() -> None:
        while not over.wait(0.05):
            seen.append(taken(folder))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        seen.append(taken(folder))


def taken(folder: Path) -> int:
    sizes: dict[int, int] = {}  # by inode: links of one file take its space once
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # gone since
                stat = os.lstat(f"{root}/{name}")
                sizes[stat.st_ino] = stat.st_size
    return sum(sizes.values())


@pytest.mark.extended
def test_a_search_keeps_to_what_it_says(tmp_path: Path, demo_dir: Path) -> None:
    """At every moment; and in the end the files that promotions resume from exist, one of no finalist too."""
    config = config_of(demo_dir, tmp_path / "runs")
    with sampled(tmp_path / "runs") as seen:
        outcome = search(config)
    output = json.loads((outcome.folder / "estimate.json").read_text())
    print(
        f"most {max(seen)} of {output['disk']} bytes, {seen[-1]} of {output['disk_kept']} in the end, {len(seen)} looks"
    )
    assert 0.5 * output["disk"] < max(seen) <= output["disk"]
    assert 0.5 * output["disk_kept"] < seen[-1] <= output["disk_kept"] < output["disk"]
    optimisers = {path.relative_to(outcome.folder).parts[1] for path in outcome.folder.rglob("*.pt")}
    finalists = {e["trial_id"] for kind in ("candidates", "baselines") for e in outcome.promotion[kind].values()}
    assert optimisers == finalists
    (other,) = (
        t.trial_id for t in load_trials(outcome.folder) if t.recipe == "asymgqa" and t.trial_id not in finalists
    )
    entry = promote_search(outcome.folder, trials=[other]).promotion["candidates"][other]
    assert entry["last_loss"] is not None and entry["status"] in ("promoted", "refused"), entry
    assert not list((outcome.folder / "train").glob("promote-*/checkpoint_*"))


TRAININGS = [
    {},
    {"zero_stage": 1},
    {"zero_stage": 1, "dtype": "bf16"},
    {"zero_stage": 2, "dtype": "bf16"},
    {"zero_stage": 3, "dtype": "bf16"},
    {"zero_stage": 1, "dtype": "bf16", "tuning": "lora"},
    {"zero_stage": 1, "dtype": "bf16", "tuning": "lora", "lora_rank": 64},
]


@pytest.mark.parametrize("changes", TRAININGS, ids=str)
def test_a_training_checkpoint_is_as_large_as_it_says(changes: dict[str, Any], demo_dir: Path, tmp_path: Path) -> None:
    group_of_one()
    settings = TrainSettings(batch_size=1, **changes)
    with closing(TrainEngine(load_trainable(demo_dir, settings), settings, 2)) as engine:
        engine.step(torch.zeros(1, 8, dtype=torch.long), objective("none", 0.0, None))
        engine.save(tmp_path)
    config = checkpoint.load_config(demo_dir)
    output, really = checkpoint_bytes(config, Size.of(config), settings), taken(tmp_path)
    assert 0.7 * output < really < 1.02 * output + 1.5 * 2**20, f"{really} bytes, {output} were said"
    if settings.tuning == "lora":
        share = 0.2 if settings.lora_rank < 64 else 0.5  # of so small a model adapters of rank 64 are a third
        assert really < share * checkpoint_bytes(config, Size.of(config), settings, whole=True)


def test_what_makes_it_more(demo_dir: Path, tmp_path: Path) -> None:
    def most(parallel: int = 1, **sections: Any) -> int:
        return storage_of(config_of(demo_dir, tmp_path, **sections)).disk(parallel).most

    rungs = [0, 1, 2, 3]
    assert most(1) < most(2) < most(3)
    assert most(search={"learning_rates": [1e-3]}) < most() < most(search={"learning_rates": [1e-3, 1e-4, 1e-5]})
    assert most(rungs={"steps": [0]}) < most(rungs={"steps": [0, 1]}) < most()
    assert most() < most(rungs={"steps": rungs, "scheduler": "front"}), "trials that wait keep their checkpoints"
    assert most(rungs={"steps": rungs, "scheduler": "front"}) < most(
        rungs={"steps": rungs, "scheduler": "front", "reduction_factor": 1.3}
    )
    assert most(train={"tuning": "lora"}) < most()
    assert most() < most(promotion={"top": 2, "steps": 3, "evaluations": 3})
    # Trials that relax start from more than they are converted to, and leave one more model
    relaxing = storage_of(config_of(demo_dir, tmp_path, search={"recipes": ["gqa", "align"]})).disk(1)
    plain = storage_of(config_of(demo_dir, tmp_path)).disk(1)
    assert relaxing.parts["trained"] > plain.parts["trained"]
    remote = storage_of(config_of(demo_dir, tmp_path).model_copy(update={"storage": "s3://bucket/runs"})).disk(1)
    assert remote.parts["checkpoints"] == 0 and remote.most < plain.most, "workers send them to the address"
    untrained = storage_of(config_of(demo_dir, tmp_path, rungs={"steps": [0]}, promotion={"enabled": False})).disk(1)
    assert untrained.parts["checkpoints"] == untrained.parts["trained"] == untrained.parts["promotion"] == 0


def test_conversions_for_trials_to_come_count_where_trials_leave_none(demo_dir: Path, tmp_path: Path) -> None:
    def converted(**sections: Any) -> int:
        sections = {"promotion": {"keep_weights": "finalists"}} | sections
        # 18 trials, of which at most the one that runs and six finalists have weights
        own = {"kv_ratios": [0.75, 0.5, 0.25], "learning_rates": [1e-3, 3e-4, 1e-4]} | sections.pop("search", {})
        return storage_of(config_of(demo_dir, tmp_path, search=own, **sections)).disk(1).parts["converted"]

    one = converted(search={"kv_ratios": [0.5], "recipes": ["gqa"], "learning_rates": [1e-3]})
    assert converted() == 8 * one, "one is carried from a rate to the next"
    planned = {"trial_gpus": 1, "plan_ahead": 2}
    assert converted(resources=planned) == 10 * one
    assert converted(resources=planned | {"plan_ahead": 0}) == 8 * one


def test_what_would_do_is_reported_and_does(demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(demo_dir, tmp_path)
    two, three = (storage_of(config).disk(parallel).most for parallel in (2, 3))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=(two + three) // 2))
    report = storage_of(config).shortage(4)
    assert report is not None and str(tmp_path) in report and "checkpoints" in report
    assert "resources.max_concurrent=2 would do" in report
    assert storage_of(config).shortage(2) is None
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**20))
    report = storage_of(config).shortage(4)
    assert report is not None and "search.num_samples" in report and "train.tuning=lora" in report
    assert "max_concurrent" not in report


def test_a_search_that_cannot_fit_is_refused_before_anything_of_it_is_made(
    demo_dir: Path, tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("too late")

    shutil.copy(empty_store, tmp_path / "mlflow.db")
    config = config_of(demo_dir, tmp_path / "runs", tracking={"uri": f"sqlite:///{tmp_path}/mlflow.db"})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**24))
    monkeypatch.setattr("orchestrator.pipeline.connected", lambda: nullcontext([Nodes(1, {"CPU": 2.0})]))
    monkeypatch.setattr("orchestrator.search.texts.SearchTexts.make_all", refuse)
    with pytest.raises(ConfigError, match=r"storage: the search takes up to .* GiB of .*runs, and 0.02 GiB are free"):
        search(config)
    assert not (tmp_path / "runs" / "small").exists()
