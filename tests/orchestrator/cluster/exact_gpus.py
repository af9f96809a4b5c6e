"""Every fan-out on a Ray with exactly so many GPUs: `python exact_gpus.py FOLDER GPUS FANOUT...`.

The GPUs are numbers that Ray counts (`train.device=cpu`), and statistics count as large. Prints a JSON object with the
result of each fan-out.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import ray

from attention.calibration.store import Calibration
from orchestrator import pipeline
from orchestrator.cluster import pending_resources
from orchestrator.cluster.pending_resources import watch_pending
from orchestrator.cluster.placement import Demand, task_options
from orchestrator.cluster.ray_tasks import on_cluster
from orchestrator.cluster.session import DASHBOARD, free_port
from orchestrator.cluster.stall import StalledError, StallWatch
from orchestrator.config.schema import SearchConfig, parse_config
from orchestrator.conversion import calibration
from orchestrator.search import prepare
from orchestrator.search.trials.context import TrialContext
from orchestrator.search.validation import Prepared, validate_search
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import OriginalRecord
from search_spaces.recipes.catalogue import recipe as named_recipe

MODEL = Path(__file__).resolve().parents[3] / "examples/stdlib-llama"
TEXTS = {name: {"source": "stdlib", "tokens": 2048} for name in ("train", "eval", "calibration")}
STALL_SECONDS = 5.0


def config_of(folder: Path, **sections: Mapping[str, Any]) -> SearchConfig:
    """A search whose trial has one worker with one GPU."""
    train = {"batch_size": 4, "micro_batch_size": 1, "cpus_per_worker": 0.5, "gpus_per_worker": 1, "device": "cpu"}
    settings = {
        "name": "exact",
        "model": {"path": str(MODEL)},
        "data": {"sequence_length": 64, **TEXTS},
        "search": {"recipes": ["headfold_gqa"], "kv_ratios": [0.5]},
        "rungs": {"steps": [0, 2]},
        "promotion": {"enabled": False},
        "resources": {"trial_gpus": 1, "trial_cpus": 0.5},
        "storage": str(folder),
    }
    return parse_config({**settings, **sections, "train": train | dict(sections.get("train", {}))})


def needs_one_more(options: Mapping[str, Any]) -> float:
    """Wait for a task that needs what this one has."""
    task: Any = ray.remote(**options)(lambda: time.time())
    return ray.get(task.options(name="another one").remote())


class FanOuts:
    """The fan-outs by name."""

    def __init__(self, folder: Path) -> None:
        self.root = folder

    @cached_property
    def config(self) -> SearchConfig:
        dha = {"recipe": "dha", "params": {"objective.steps": 2}}
        return config_of(
            self.root, search={"recipes": [dha, "headfold_layers"], "kv_ratios": [0.5], "seeds": [0, 1, 2]}
        )

    @cached_property
    def prepared(self) -> Prepared:
        return validate_search(self.config)

    @cached_property
    def folder(self) -> SearchFolder:
        return SearchFolder.fresh(self.root, "exact")

    @cached_property
    def original(self) -> OriginalRecord:
        return prepare.prepare_original(self.config, self.prepared, self.folder)

    @cached_property
    def context(self) -> TrialContext:
        return prepare.trial_context(self.config, self.prepared, self.folder, self.original)

    @property
    def cache(self) -> Path:
        return self.prepared.cache / "calibration"

    def calibration(self) -> list[str]:
        """The digests of the statistics of all layers."""
        created = Calibration.load(self.cache / f"calibration-{self.original['digests']['calibration']}")
        assert all(bool(layer.mixed_moments.isfinite().all()) for layer in created.layers)
        files = sorted(self.cache.glob("calibration-*/*.safetensors"))
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]

    def increases(self) -> int:
        """Layers whose increases of the loss were measured."""
        prepare.SEVERAL = 1
        prepare.measure_increases(self.config, self.prepared, self.context)
        records = [json.loads(file.read_text()) for file in self.cache.glob("*.json")]
        return len({point.partition("/")[0] for record in records for point in record if point[0].isdigit()})

    def search_phases(self) -> int:
        """Search phases of dha, one a seed."""
        prepare.run_search_phases(self.config, self.prepared, self.context)
        return len(list(self.cache.glob("fusion-distances-*")))

    def similarities(self) -> int:
        """Similarities of heads that a searcher of plans is handed."""
        options = task_options(self.config)
        recipe = named_recipe("asymgqa")
        return len(on_cluster(options, "similarities", prepare.head_similarities, self.context, recipe))

    def stalled(self) -> str:
        """Why a search ends whose task waits for one that needs the same GPU."""
        pending_resources.STATUS_SECONDS = 0.5
        options = task_options(self.config)
        watch = StallWatch(STALL_SECONDS, lambda: 0.0)
        try:
            with watch_pending(lambda: Demand.of(self.config), lambda text: None, watch):
                on_cluster(options, "original model", needs_one_more, options)
        except StalledError as error:
            return str(error)
        return "ended"

    def search(self) -> dict[str, Any]:
        """A whole search whose trials have two workers: planning, trainings, promotion, gate, evaluation."""
        config = config_of(
            self.root,
            search={"recipes": ["gqa", "headfold_gqa"], "kv_ratios": [0.5], "learning_rates": [1e-4, 3e-4]},
            train={"num_workers": 2, "cpus_per_worker": 0.95},
            # All CPUs of the nodes, and none for who waits for the workers
            promotion={"steps": 4, "evaluations": 1, "tasks": ["demo"], "train": {"cpus_per_worker": 1}},
            resources={"trial_gpus": 1, "trial_cpus": 0.5, "reuse_workers": False},
        )
        outcome = pipeline.search(config)
        statuses = [trial.status for trial in outcome.trials]
        original = json.loads((outcome.folder / "original.json").read_text())
        promoted = {entry["status"] for entry in outcome.to_dict()["promotion"]["candidates"].values()}
        return {"trials": statuses, "promoted": sorted(promoted), "calibrated": "calibration" in original["digests"]}


def main(folder: Path, gpus: int, names: list[str]) -> dict[str, Any]:
    calibration.SHARED_BYTES = 0
    port = free_port()
    # Ray Train removes placement groups of stopped trials through it, and it reports the names of tasks
    dashboard = not {"search", "stalled"}.isdisjoint(names)
    settings: dict[str, Any] = {"include_dashboard": False}
    if dashboard:
        settings = {"include_dashboard": True, "dashboard_port": port}
        environment = {DASHBOARD: f"http://127.0.0.1:{port}", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
        settings["runtime_env"] = {"env_vars": environment}
        os.environ |= environment  # otherwise Ray connects to another Ray on this machine
    ray.init(address="local", num_cpus=gpus, num_gpus=gpus, logging_level="ERROR", log_to_driver=False, **settings)
    created = FanOuts(folder)
    return {name: getattr(created, name)() for name in names}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
