"""Trials that Ray Tune really pauses or stops: what becomes of them, and of those that come after."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune.search import Searcher

from orchestrator.config.schema import read_search_config
from orchestrator.search.resume import JournaledScheduler, JournaledSearch
from orchestrator.search.schedulers import RungProblem, make_scheduler
from orchestrator.search.tune_run import run_tuner, stops_in_training
from orchestrator.storage.journal import Journal

CONFIG = {"recipe": "own", "kv_ratio": 0.5, "learning_rate": 1e-3, "choices": {}}

LOSSES = [[5.0, 4.0, 3.0], [4.0, 3.5, 2.0], [4.5, 3.0, 2.5], [6.0, 5.0, 4.0], [3.0, 3.0, 1.0], [7.0, 6.0, 5.0]]


class Listed(Searcher):
    def __init__(self, configs: list[dict[str, Any]]) -> None:
        super().__init__(metric="loss", mode="min")
        self.configs = [CONFIG | config for config in configs]

    def suggest(self, trial_id: str) -> Any:
        return self.configs.pop(0) if self.configs else Searcher.FINISHED

    def on_trial_result(self, trial_id: str, result: dict) -> None:
        """Nothing to learn."""

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        """Nothing to learn."""


def tune_config(configs: list[dict[str, Any]], name: str, slots: int, folder: Path, reuse_actors: bool) -> Any:
    """As in a search: a scheduler and a searcher with a journal."""
    journal = Journal(folder / "journal.jsonl")
    journal.begin(3)
    inner = make_scheduler(name, RungProblem(3, 2.0))
    inner.slots.capacity = slots
    scheduler = JournaledScheduler(inner, journal)
    search = JournaledSearch(Listed(configs), scheduler, journal)
    return tune.TuneConfig(search_alg=search, scheduler=scheduler, num_samples=len(configs), reuse_actors=reuse_actors)


def make_train() -> Any:
    """Made inside, so that Ray sends it by value."""

    def train(config: dict[str, Any]) -> None:
        """Like a trial: repeats its earlier reports, then continues from the files in its folder."""
        log = Path(config["folder"]) / f"{config['number']}.jsonl"
        done = len(log.read_text().splitlines()) if log.exists() else 0
        for rung, loss in enumerate(config["losses"]):
            if rung >= done:  # one line for each rung that was trained
                with log.open("a") as stream:
                    stream.write(json.dumps({"rung": rung}) + "\n")
            tune.report({"loss": loss, "kv_bytes_per_token": 1, "rung": rung, "step": rung})

    return train


@pytest.mark.slow
def test_tune_pauses_and_continues_trials(tmp_path: Path, ray_cluster: None) -> None:
    configs = [{"folder": str(tmp_path), "number": n, "losses": losses} for n, losses in enumerate(LOSSES)]
    tuner = tune.Tuner(
        tune.with_resources(make_train(), {"CPU": 0.5}),
        tune_config=tune_config(configs, "front", 2, tmp_path, reuse_actors=True),
        run_config=tune.RunConfig(name="pausing", storage_path=str(tmp_path / "tune"), verbose=0),
    )
    handler = signal.getsignal(signal.SIGINT)
    assert not run_tuner(tuner).errors
    assert signal.getsignal(signal.SIGINT) is handler, "that of Tune swallows the next Ctrl-C"
    rungs = Counter(len((tmp_path / f"{n}.jsonl").read_text().splitlines()) for n in range(len(LOSSES)))
    assert rungs == {1: 3, 2: 2, 3: 1}  # six, three of them, one of those: nothing was trained twice


def make_busy() -> Any:
    def train(config: dict[str, Any]) -> None:
        """Like a trial whose workers train: their reports come from elsewhere, and it waits for their end."""
        from ray.tune.integration.ray_train import TuneReportCallback

        report: Any = TuneReportCallback()
        for rung, loss in enumerate(config["losses"]):
            report.after_report(None, [{"loss": loss, "kv_bytes_per_token": 1, "rung": rung, "step": rung}], None)
            time.sleep(5 if rung else 0)

    return train


def test_a_search_that_stops_in_training_gives_each_trial_a_process() -> None:
    demo = "configs/demo.yaml"
    assert stops_in_training(read_search_config(demo), pooled=True)
    never = read_search_config(demo, ["rungs.stop=false"])
    assert not stops_in_training(never, pooled=True)
    assert stops_in_training(never, pooled=False), "a loss that is not finite stops a trial all the same"
    two = read_search_config(demo, ["rungs.steps=[0,8]"])
    assert not stops_in_training(two, pooled=True), "stopped before the workers start"
    assert not stops_in_training(read_search_config(demo, ["rungs.steps=[0]"]), pooled=False), "nothing trains"


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_trial_after_one_stopped_in_training_has_its_turn(tmp_path: Path, ray_cluster: None) -> None:
    losses = [[5.0, 4.0, 3.0], [5.0, 9.0, 9.0], [5.0, 3.0, 2.0]]
    reuse_actors = not stops_in_training(read_search_config("configs/demo.yaml"), pooled=True)
    tuner = tune.Tuner(
        tune.with_resources(make_busy(), {"CPU": 0.5}),
        tune_config=tune_config([{"losses": own} for own in losses], "asha", 1, tmp_path, reuse_actors),
        run_config=tune.RunConfig(name="stopping", storage_path=str(tmp_path / "tune"), verbose=0),
    )
    result = run_tuner(tuner)
    assert not result.errors
    last = {tuple(one.config["losses"]): one.metrics["rung"] for one in result if one.config and one.metrics}
    assert list(last.values()) == [2, 1, 2]
