"""A job for the cluster: trials under Ray Tune, each of which takes the GPUs of a node. `python cluster_trials.py ...`

Arguments: storage folder, number of trials, GPUs of each, steps, seconds per step. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune


def trial(config: dict[str, Any]) -> None:
    """Counts steps, and keeps them in a checkpoint: what was counted before a loss of the node is not done again."""
    done, kept = 0, tune.get_checkpoint()
    if kept is not None:
        with kept.as_directory() as folder:
            done = json.loads((Path(folder) / "state.json").read_text())["step"]
    node = ray.get_runtime_context().get_node_id()
    (resources,) = (n["Resources"] for n in ray.nodes() if n["NodeID"] == node)
    for step in range(done + 1, config["steps"] + 1):
        time.sleep(config["seconds"])
        report = {"step": step, "from": done, "node": node, "resources": resources}
        with (Path(config["log"]) / f"{tune.get_context().get_trial_id()}.jsonl").open("a") as log:
            log.write(json.dumps(report) + "\n")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "state.json").write_text(json.dumps({"step": step}))
            tune.report(report, checkpoint=tune.Checkpoint.from_directory(folder))


def main(storage: str, trials: int, gpus: float, steps: int, seconds: float) -> None:
    log = Path(storage) / "steps"
    log.mkdir(parents=True)
    tuner = tune.Tuner(
        tune.with_resources(trial, {"GPU": gpus}),
        param_space={"steps": steps, "seconds": seconds, "log": str(log)},
        tune_config=tune.TuneConfig(num_samples=trials, metric="step", mode="max"),
        run_config=tune.RunConfig(
            name="trials",
            storage_path=storage,
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=2),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=2),
        ),
    )
    result = tuner.fit()
    print(json.dumps({"errors": result.num_errors, "metrics": [r.metrics for r in result]}, default=str))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
