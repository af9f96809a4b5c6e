"""Changes of the configuration that make another search, and those with which an earlier search can be resumed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.config.schema import parse_config, read_search_config
from orchestrator.pipeline import _changed_sections, _config_record, _new_folder, _save_changes
from orchestrator.search.duplicates import work_digest
from trainers.jobs.train_job import TrainJob
from trainers.settings import TrainSettings

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo.yaml"


def changed(record: dict[str, Any], *changes: str) -> list[str]:
    folder: Any = SimpleNamespace(stored=lambda: record, snapshot=DEMO)
    return _changed_sections(folder, read_search_config(DEMO, list(changes)))


def test_a_search_from_before_some_keys_is_resumed() -> None:
    record = _config_record(read_search_config(DEMO, []))
    for name in ("document_mask", "compile"):
        del record["train"][name]
    record["train"]["activation_checkpointing"] = False
    assert changed(record) == changed(record, "train.activation_checkpointing=selective") == []
    for change in ("train.document_mask=true", "train.compile=true", "train.seed=7"):
        assert changed(record, change) == ["train"]


def test_a_search_that_was_begun_with_other_defaults_keeps_them() -> None:
    former = {"learning_rate": 3e-4, "distillation": "none", "distillation_weight": 0.5}
    record = _config_record(read_search_config(DEMO, []))
    record["train"] |= former
    assert changed(record) == changed(record, "train.distillation=none") == []
    for change in ("train.distillation=kl", "train.learning_rate=1e-4"):
        assert changed(record, change) == ["train"]
    now = read_search_config(DEMO, ["train.learning_rate=1e-4"])
    begun = now.begun_as(parse_config(record)).train
    assert (begun.distillation, begun.distillation_weight, begun.learning_rate) == ("none", 0.5, 1e-4)


def test_the_work_of_a_trial_is_what_decides_its_weights(tmp_path: Path) -> None:
    def digest(**settings: Any) -> str:
        folders: dict[str, Any] = {"model_dir": "m", "out_dir": "/o", "storage_path": "/s", "run_name": "r"}
        job = TrainJob(**folders, train_file="t", eval_file="e", milestones=(1,), settings=TrainSettings(**settings))
        return work_digest(job, tmp_path)

    assert digest() == digest(activation_checkpointing="selective") == digest(activation_checkpointing=False)
    assert len({digest(), digest(document_mask=True), digest(seed=1)}) == 3


def test_a_resumed_search_is_promoted_with_its_last_settings(tmp_path: Path) -> None:
    begun = read_search_config(DEMO, ["promotion.steps=0", "promotion.keep_weights=finalists"])
    folder = _new_folder(begun, tmp_path)
    before = folder.snapshot.stat()
    _save_changes(folder, begun, begun)
    assert folder.snapshot.stat() == before, "nothing is written where nothing has changed"
    changes = [
        "promotion.steps=2000",
        "promotion.keep_weights=all",
        "promotion.top=5",
        "tracking.uri=http://user:secret@host:5000",
    ]
    _save_changes(folder, read_search_config(DEMO, [*changes, "train.micro_batch_size=1"]), begun)
    stored = parse_config(folder.stored())
    assert (stored.promotion.steps, stored.train.micro_batch_size) == (2000, 1)
    weights = ("finalists", begun.promotion.top)
    assert (stored.promotion.keep_weights, stored.promotion.top) == weights, "those of some trials are gone"
    assert stored.tracking.uri == "http://***@host:5000"
    assert (stored.storage, stored.search) == (begun.storage, begun.search)
