"""Promoted checkpoints as models of MLflow, loaded from its store by its own library."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowException, pyfunc
from mlflow import transformers as flavour
from mlflow_at import mlflow_at
from transformers import AutoModelForCausalLM

from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from orchestrator.tracking.errors import TrackingError
from orchestrator.tracking.logged_model import MLMODEL, write_mlmodel
from orchestrator.tracking.runs import Tracker

DEMO = Path(__file__).resolve().parents[3] / "examples" / "stdlib-llama"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as a promotion leaves it."""
    folder = tmp_path_factory.mktemp("search") / "exported"
    shutil.copytree(DEMO, folder)
    assert write_mlmodel(folder, "stdlib-llama")
    checkpoint.write_digests(folder)
    return folder


def test_a_version_is_loaded_from_the_store_by_mlflow(tracker: Tracker, exported: Path) -> None:
    run_id = tracker.start("promotion")
    version = tracker.register("demo", exported, run_id, tags={"gate": "passed"}, description="x")
    tracker.set_alias("demo", "kv25", version)
    with mlflow_at(tracker.uri):
        parts: Any = flavour.load_model(f"models:/demo/{version}", return_type="components")
        pipeline: Any = pyfunc.load_model("models:/demo@kv25")
        (text,) = pipeline.predict(["import os\n"], params={"max_new_tokens": 4})
        (logged,) = tracker.client.search_logged_models([tracker.experiment_id])
        again: Any = flavour.load_model(f"models:/{logged.model_id}", return_type="components")
    stock = AutoModelForCausalLM.from_pretrained(exported)
    tokens = torch.arange(12).view(1, 12)
    for model in (parts["model"], again["model"]):
        assert torch.equal(model(tokens).logits, stock(tokens).logits)
    assert text.startswith("import os\n")


def test_a_logged_model_is_made_once_and_weights_are_stored_once(
    tracker: Tracker, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = tracker.start("promotion")
    created = tracker.client.create_model_version

    def killed(*arguments: Any, **named: Any) -> None:
        raise MlflowException("killed here")

    monkeypatch.setattr(tracker.client, "create_model_version", killed)
    with pytest.raises(TrackingError):
        tracker.register("demo", exported, run_id, tags={}, description="x")
    monkeypatch.setattr(tracker.client, "create_model_version", created)
    assert tracker.register("demo", exported, run_id, tags={}, description="x") == "1"
    assert tracker.register("demo", exported, run_id, tags={}, description="x") == "1"
    (model,) = tracker.client.search_logged_models([tracker.experiment_id])
    assert (str(model.status), model.source_run_id, model.name) == ("READY", run_id, "demo")
    assert [m.model_id for m in tracker.client.get_run(run_id).outputs.model_outputs] == [model.model_id]
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": "demo", "version": 1}]
    place = Path(model.artifact_location.removeprefix("file://"))
    assert tracker.client.get_model_version("demo", "1").source == str(place)
    files = {file.relative_to(exported) for file in exported.rglob("*") if file.is_file()}
    assert {file.relative_to(place) for file in place.rglob("*") if file.is_file()} == files
    assert all((place / file).samefile(exported / file) for file in files)


def test_where_files_cannot_be_linked_the_folder_itself_is_the_version(
    tracker: Tracker, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError(18, "another file system")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    tracker.register("demo", exported, tracker.start("promotion"), tags={}, description="x")
    assert tracker.client.get_model_version("demo", "1").source == str(exported)


def test_the_folder_is_still_one_that_headfold_wrote_whole(exported: Path) -> None:
    assert checkpoint.intact(exported) and (exported / MLMODEL).is_file()
    weights = exported / "model.safetensors"
    assert weights.read_bytes() == (DEMO / "model.safetensors").read_bytes()
    assert list(exported.rglob("*.safetensors")) == [weights]


def test_our_own_format_is_loaded_by_pyfunc(tracker: Tracker, tmp_path: Path) -> None:
    """A model like the best of many searches: with different head counts per layer."""
    stock = checkpoint.load(DEMO)
    layers = tuple(LayerPlan((0, 0, 0, 0, 1, 1, 2, 3), tuple(range(8))) for _ in range(4))
    checkpoint.save(convert(stock, AttentionPlan(layers, 32)), tmp_path / "headfold", DEMO)
    assert write_mlmodel(tmp_path / "headfold", "stdlib-llama")
    version = tracker.register("demo", tmp_path / "headfold", tracker.start("x"), tags={}, description="x")
    with mlflow_at(tracker.uri):
        pipeline: Any = pyfunc.load_model(f"models:/demo/{version}")
        short, long = (pipeline.predict(["import os\n"], params={"max_new_tokens": count})[0] for count in (2, 9))
    assert short.startswith("import os\n") and long.startswith("import os\n") and len(long) > len(short)
    assert "cache Headfold has made smaller" in tracker.client.get_registered_model("demo").description


def test_without_a_tokenizer_there_is_no_pipeline(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "bare", ignore=shutil.ignore_patterns("token*"))
    assert not write_mlmodel(tmp_path / "bare", "x")
    assert not (tmp_path / "bare" / MLMODEL).exists()
