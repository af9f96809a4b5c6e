"""Metadata of a search in MLflow: names of metrics, params, texts, times, and how its page opens."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.config.schema import SearchConfig, parse_config
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import DONE, RUNNING, TrialRecord
from orchestrator.tracking.metrics import METRICS, best_point, point
from orchestrator.tracking.run_metadata import search_note, shared_metadata, trial_run
from orchestrator.tracking.runs import KIND, NOTE, TRAINING, Tracker
from orchestrator.tracking.sync import MlflowSync, parent_run
from trainers.text.token_sets import write_sequences

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def config(tmp_path: Path) -> SearchConfig:
    data = {"source": "stdlib", "train": {"tokens": 64, "source": "texts/train.txt"}, "sequence_length": 8}
    search = {"recipes": ["gqa"], "kv_ratios": [0.5], "baseline": "gqa", "seed": 3}
    return parse_config({"name": "small", "model": {"path": "m"}, "data": data, "search": search})


@pytest.fixture
def folder(tmp_path: Path) -> SearchFolder:
    folder = SearchFolder.fresh(tmp_path, "small")
    write_json(folder.state, {"command": "headfold search small.yaml"})
    write_json(folder.versions, {"headfold": "1.2"})
    return folder


def texts(folder: Path) -> dict[str, Path]:
    files = {split: folder / split for split in ("train", "eval", "calibration")}
    for number, file in enumerate(files.values(), 2):
        write_sequences(torch.arange(8 * number).view(number, 8), file)
    return files


def test_the_field_s_names_and_only_numbers_that_the_table_knows() -> None:
    report = {"loss": 2.0, "loss_increase": 0.5, "kl": 0.1, "tokens": 64, "gradient_norm": 1.5, "learning_rate": 1e-3}
    report |= {"train_loss": 2.5, "batch_loss": 3.0, "tokens_per_second": 9.0, "kv_bytes_per_token": 64}
    noise = {"data_position": 7, "rung": 1, "seconds": 3.0, "pooled": True, "checkpoint_path": "x", "task_a_acc": 0.5}
    assert point(report | noise, 4, 5.0) == {
        "eval_loss": 2.0,
        "eval_loss_delta": 0.5,
        "eval_kl": 0.1,
        "perplexity": math.exp(2.0),
        "train_loss": 2.5,
        "train_loss_step": 3.0,
        "train_tokens": 64,
        "tokens_per_second": 9.0,
        "learning_rate": 1e-3,
        "grad_norm": 1.5,
        "kv_bytes_per_token": 64,
        "task_a_acc": 0.5,
        "step": 4,
        "time": 5.0,
    }
    assert "perplexity" not in point({"loss": math.inf}, 0, 0.0) | point({"loss": 1e4}, 0, 0.0)
    best = {"best_eval_loss_kv12.5": 2.5, "best_eval_loss_delta_kv12.5": 0.5, "step": 0, "time": 1.0}
    assert best_point({0.125: 2.5}, 2.0, 0, 1.0) == best


def test_the_page_opens_on_runs(tmp_path: Path, tracker: Tracker) -> None:
    created = tracker.client.get_experiment(tracker.experiment_id)
    assert created.tags[KIND] == TRAINING and "One run per search" in created.tags["mlflow.note.content"]
    older = tracker.client.create_experiment("of an earlier version")
    assert Tracker.open(None, "of an earlier version", tmp_path).experiment_id == older
    assert tracker.client.get_experiment(older).tags[KIND] == TRAINING
    tracker.client.set_experiment_tag(older, KIND, "genai_development")  # somebody's choice
    Tracker.open(None, "of an earlier version", tmp_path)
    assert tracker.client.get_experiment(older).tags[KIND] == "genai_development"


def test_the_description_of_the_experiment_links_the_newest_reports(tracker: Tracker, folder: SearchFolder) -> None:
    def note() -> str:
        return tracker.client.get_experiment(tracker.experiment_id).tags[NOTE]

    sync = MlflowSync(lambda: tracker, parent_run(folder.root))
    described = note()
    assert not described.startswith("Reports: ")
    folder.report.write_text("<h1>Report</h1>")
    for status in (RUNNING, DONE):  # one that was written anew is linked once
        run_id = sync.put(parent_run(folder.root, files=[folder.report], status=status))
        os.utime(folder.report, (1, 1))
    link = f"[{folder.root.name}](#/experiments/{tracker.experiment_id}/runs/{run_id}/artifacts/report.html)"
    assert note() == f"Reports: {link}\n\n{described}"
    assert [file.path for file in tracker.client.list_artifacts(run_id)] == ["report.html"]
    tracker.client.set_experiment_tag(tracker.experiment_id, NOTE, "Reports: mine.\n\nOf last week.")
    for number in range(30):
        tracker.link_report(f"run{number}", f"search {number}")
    line, *rest = note().split("\n\n")
    assert rest == ["Reports: mine.", "Of last week."], "what a user has written stays"
    assert re.findall(r"\[search (\d+)\]", line) == [str(number) for number in range(29, 9, -1)]


def test_a_trial_has_its_size_at_every_rung(tracker: Tracker, folder: SearchFolder) -> None:
    """MLflow draws loss over size by joining the two metrics by their steps."""
    record = TrialRecord("t1", "gqa", 0.5, 1e-3, {}, DONE, kv_bytes_per_token=64)
    record.rungs = [{"step": step, "loss": 2.5, "timestamp": 10.0 + step} for step in (0, 8, 24)]
    run_id = MlflowSync(lambda: tracker, parent_run(folder.root)).put(trial_run(record, folder.root))
    sizes = tracker.client.get_metric_history(run_id, "kv_bytes_per_token")
    assert [(size.step, size.value) for size in sizes] == [(0, 64.0), (8, 64.0), (24, 64.0)]


def test_the_kind_is_one_that_mlflow_s_page_knows() -> None:
    import mlflow.server

    scripts = Path(mlflow.server.__file__).parent / "js" / "build" / "static" / "js"
    assert any(f'"{TRAINING}"' in script.read_text(errors="ignore") for script in scripts.glob("*.js"))


def test_every_run_has_params_texts_and_where_it_comes_from(
    config: SearchConfig, folder: SearchFolder, tracker: Tracker, tmp_path: Path
) -> None:
    shared = shared_metadata(config, folder, texts(tmp_path / "data"), "stdlib-llama")
    sync = MlflowSync(lambda: tracker, parent_run(folder.root), shared=shared)
    record = TrialRecord("t1", "gqa", 0.5, 1e-3, {"fusion": "mean", "alignment": "none"}, DONE, seed=7)
    record.rungs = [{"step": 0, "loss": 2.5, "timestamp": 10.0}]
    run_id = sync.put(trial_run(record, folder.root))
    for run in map(tracker.client.get_run, (sync.parent_id, run_id)):
        assert run.data.tags["mlflow.source.name"] == "headfold search"
        assert run.data.tags["headfold.command"] == "headfold search small.yaml"
        assert run.data.tags["headfold.version"] == "1.2"
        assert (run.data.params["base_model"], run.data.params["batch_size"]) == ("stdlib-llama", "8")
        used = {one.tags[0].value: one.dataset for one in run.inputs.dataset_inputs}
        assert {split: json.loads(text.profile)["num_tokens"] for split, text in used.items()} == {
            "train": 16,
            "eval": 24,
            "calibration": 32,
        }
        assert used["train"].name == "train: train.txt" and json.loads(used["eval"].source) == {"uri": "stdlib"}
        assert len({text.digest for text in used.values()}) == 3
    report: Any = tracker.client.get_run(run_id).data
    params = {"recipe": "gqa", "kv_ratio": "0.5", "seed": "7", "learning_rate": "0.001", "choices.fusion": "mean"}
    assert params.items() <= report.params.items()
    assert report.tags["mlflow.note.content"].endswith("fusion mean") and "`t1`" in report.tags["mlflow.note.content"]


def test_the_description_of_a_search_reports_recipes_and_sizes(config: SearchConfig, folder: SearchFolder) -> None:
    report = search_note(config, folder)
    assert all(arm.name in report for arm in config.search.recipes) and "on `m`" in report
    assert f"`headfold ui {folder.root}`" in report


def test_a_run_is_renamed_when_there_is_another_of_its_name(tracker: Tracker, folder: SearchFolder) -> None:
    sync = MlflowSync(lambda: tracker, parent_run(folder.root))
    record = TrialRecord("t1", "gqa", 0.5, 1e-3, {})
    run_id = sync.put(trial_run(record, folder.root))
    record.name = "gqa · 50% · seed 1"
    assert sync.put(trial_run(record, folder.root)) == run_id
    assert tracker.client.get_run(run_id).info.run_name == "gqa · 50% · seed 1"


def test_the_table_of_the_docs_is_the_table(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "trials.md").read_text(encoding="utf-8")
    section = text.partition("## In MLflow")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w/]+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))))
    assert named == {*METRICS.values(), "perplexity"}
