"""A trial whose planning is a Ray task, as where planning takes GPUs. Here the task requests CPUs: its results and its
failures are the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.util.state import list_tasks

from benchmarks.worker_pool import demo_context
from orchestrator.cluster.pool_client import open_pool
from orchestrator.cluster.session import last_error
from orchestrator.search.candidates import Candidate
from orchestrator.search.trials.context import TrialContext
from orchestrator.search.trials.trial import run_trial
from orchestrator.search.tune_run import run_tuner
from orchestrator.storage.json_files import read_json
from search_spaces.recipes.catalogue import recipe

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

TASK = {"num_cpus": 0.5, "num_gpus": 0}
SAME = ("loss", "kl", "plan_digest", "similarity", "kv_bytes_per_token", "work_digest")


@pytest.fixture(scope="module")
def context(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialContext]:
    folder = tmp_path_factory.mktemp("trials")
    with open_pool(str(folder / "groups")) as pool:
        yield replace(demo_context(folder / "in-process", 1, (0, 2)), pool=pool)


def run(context: TrialContext, name: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """One trial under Ray Tune: its result, and its files of rung 0."""
    ours = replace(context, folder=str(Path(context.folder).parent / name), **changes)
    config = Candidate(recipe("gqa"), 0.25, 3e-4, seed=0).config()
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(run_trial, context=ours), {"CPU": 0.05}),
        param_space=config,
        run_config=tune.RunConfig(storage_path=f"{ours.folder}/tune", verbose=0),
    )
    (result,) = run_tuner(tuner)
    facts = list(Path(ours.folder, "trials").glob("*/facts.json"))
    return result, read_json(facts[0]) if facts else {}


def tasks() -> int:
    return len(list_tasks(filters=[("name", "=", "watched_facts")]))


def test_a_task_comes_to_what_the_trials_own_process_does(context: TrialContext) -> None:
    result, facts = run(context, "in-process")
    assert result.error is None and result.metrics["step"] == 2
    before = tasks()
    by_task, facts_by_task = run(context, "in-task", task=TASK)
    assert tasks() == before + 1
    assert {key: facts_by_task[key] for key in SAME} == {key: facts[key] for key in SAME}
    assert by_task.metrics["step"] == 2 and by_task.metrics["loss"] == result.metrics["loss"]


def test_a_trial_that_trains_nothing_plans_itself(context: TrialContext) -> None:
    before = tasks()
    result, _ = run(context, "untrained", task=TASK, rungs=(0,))
    assert result.error is None and result.metrics["step"] == 0
    assert tasks() == before


def test_what_went_wrong_in_a_task_is_reported_as_of_the_trial(context: TrialContext) -> None:
    result, facts = run(context, "broken", task=TASK, calibration_file="/nowhere/calibration.safetensors")
    assert not facts
    output = last_error(Path(result.path, "error.txt").read_text())
    assert "/nowhere/calibration.safetensors" in output and "ray.exceptions" not in output
