"""Whatever is killed, a search ends as one that was left alone: same trials, same decisions, same front, nothing left.

`make test` kills five things; `make chaos` at least twenty (HEADFOLD_CHAOS_KILLS, HEADFOLD_CHAOS_SEED).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos import KINDS, MORE_KINDS, Arena, Killer, arena, schedule, undisturbed
from search_process import LITTLE

from orchestrator.storage.journal import END, REPORT, TRIAL, load_trials, read_events, read_history
from orchestrator.storage.records import COPY, DONE, STOPPED, read_json
from orchestrator.tracking.runs import Tracker

KILLS = int(os.environ.get("HEADFOLD_CHAOS_KILLS", "5"))
SEED = int(os.environ.get("HEADFOLD_CHAOS_SEED", "0"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + 600 * KILLS)]

SEARCH = [
    "name=chaos",
    "search.kv_ratios=[0.25]",
    "rungs.steps=[0,1,3]",
    "promotion.steps=2",
    *LITTLE,
]
SMALL = [
    *SEARCH,
    "search.searcher=grid",
    "search.recipes=[gqa, least_squares, {recipe: gqa, label: again}]",  # the third is stopped where it begins
    "search.num_samples=0",
]
LARGE = [
    *SEARCH,
    "search.searcher=optuna",
    "search.recipes=[gqa, least_squares]",
    "search.learning_rates=[3e-4,1e-3]",
    "search.num_samples=8",
]
SETTINGS, MEGABYTES = (SMALL, 768) if len(KINDS) >= KILLS else (LARGE, 3072)  # a trial leaves some 130

LOAD_PLAIN = """
import sys
for name in ("attention", "search_spaces", "trainers", "orchestrator"):
    sys.modules[name] = None  # importing it raises
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
AutoTokenizer.from_pretrained(sys.argv[1])
with torch.no_grad():
    print(model.config.num_key_value_heads, model(torch.arange(40).view(1, 40)).logits.double().sum().item())
"""


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[dict[str, Any]]:
    """The search left alone, and what is to be compared of it."""
    with arena(tmp_path_factory.mktemp("calm"), empty_store, SETTINGS, MEGABYTES) as place:
        undisturbed(place)
        assert place.nodes.leftovers() == []
        place.nodes.close()  # room for the next
        yield summary(place) | {"place": place}


def summary(place: Arena) -> dict[str, Any]:
    """What a search has found: nothing of when and where."""
    events = read_events(place.journal)
    outcome = place.outcome
    promoted = outcome["promotion"]["candidates"].values()
    return {
        "trials": {e["trial"]: e["config"] for e in events if e["event"] == TRIAL},
        "decisions": [
            (e["trial"], e["result"]["rung"], e["result"]["loss"], e["decision"])
            for e in events
            if e["event"] == REPORT
        ],
        "ends": [(e["trial"], e["error"]) for e in events if e["event"] == END],
        "front": [(t, loss_of(outcome, t)) for t in outcome["front"]],
        "promoted": sorted((c["trial_id"], c["status"], c["loss"], c["baseline_loss"]) for c in promoted),
    }


def decision_of(event: dict[str, Any]) -> tuple[str, int, float, str]:
    result = event["result"]
    return event["trial"], result["rung"], result["loss"], event["decision"]


def loss_of(outcome: dict[str, Any], trial: str) -> float:
    (found,) = [t for t in outcome["trials"] if t["trial_id"] == trial]
    return found["rungs"][-1]["loss"]


def test_a_search_ends_in_an_exported_checkpoint(calm: dict[str, Any], tmp_path: Path) -> None:
    place: Arena = calm["place"]
    outcome, trials = place.outcome, load_trials(place.search)
    assert outcome["folder"] == str(place.search)
    assert {t.status for t in trials} <= {DONE, STOPPED, COPY}
    assert {"STOP", "CONTINUE"} == {decision for *_, decision in calm["decisions"]}
    losses = {t.recipe: t.loss for t in trials}
    assert losses["least_squares"] < losses["gqa"] - 1
    for t in trials:
        assert t.similarity is not None and t.seed is not None
        assert t.similarity["means"]["value_aligned"] > t.similarity["means"]["value_raw"] + 0.1
    (candidate,) = outcome["promotion"]["candidates"].values()
    assert (candidate["status"], candidate["steps"]) == ("promoted", 5)
    assert candidate["loss"] < candidate["baseline_loss"]
    check_mlflow(place)
    assert Path(outcome["report"]).stat().st_size > 10_000
    written = sum(path.stat().st_size for path in place.search.rglob("*") if path.is_file())
    assert 0.5 < written / read_json(place.search / "estimate.json")["disk"] < 1.1
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD_PLAIN, outcome["promotion"]["exported"]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split()[0] == "2"


def test_a_search_under_kills_ends_as_one_that_was_left_alone(
    calm: dict[str, Any], tmp_path: Path, empty_store: Path
) -> None:
    with arena(tmp_path / "chaos", empty_store, SETTINGS, MEGABYTES) as place:
        killer = Killer(place)
        killer.run(schedule(SEED, KILLS))
        told = json.dumps({"kills": killer.done, "starts of the driver": place.starts, "when": killer.told})
        print(f"\nchaos, seed {SEED}: {told}; disk full by {'tmpfs' if place.disk.mounted else 'a file size limit'}")
        assert killer.done.total() == KILLS
        assert set(killer.done) == set(KINDS if len(KINDS) >= KILLS else MORE_KINDS)
        found = summary(place)
        assert {name: found[name] for name in found} == {name: calm[name] for name in found}
        check_mlflow(place)
        assert unfinished_files(place) == []
        assert place.nodes.leftovers() == []


def check_mlflow(place: Arena) -> None:
    """Each trial and each promotion is one run, ended, with one point at each rung."""
    tracker = Tracker.open(place.server.address, "headfold", place.storage)
    parent = read_json(place.search / "state.json")["parent_run"]
    names = {run.info.run_id: run for run in tracker.client.search_runs([tracker.experiment_id], max_results=1000)}
    children = [run for run in names.values() if "mlflow.parentRunId" in run.data.tags]
    assert set(names) - {run.info.run_id for run in children} == {parent}
    assert {run.info.status for run in names.values()} == {"FINISHED"}
    trials = [run for run in children if run.data.tags["headfold.kind"] == "trial"]
    records = read_history(place.journal).records
    assert sorted(run.data.tags["trial_id"] for run in trials) == sorted(records)
    for run in trials:
        points = tracker.client.get_metric_history(run.info.run_id, "loss")
        wanted = [(r["step"], r["loss"]) for r in records[run.data.tags["trial_id"]].rungs]
        assert sorted((p.step, p.value) for p in points) == wanted
    kinds = sorted(run.data.tags["headfold.kind"] for run in children if run not in trials)
    assert kinds == ["promotion baseline", "promotion candidate"]


def unfinished_files(place: Arena) -> list[str]:
    """Files of killed writers, in the search and among the temporary ones; Ray's own sessions lie elsewhere."""
    half = [p for p in place.search.rglob("*") if p.name.endswith((".new", ".old")) or p.name.startswith(".tmp")]
    return sorted(str(p) for p in [*half, *place.scratch.iterdir()])
