"""Tasks of finalists: scores of them and the original, a gate that requires them, metrics and an artifact in MLflow."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from journals import write_journal
from transformers import PreTrainedModel

from attention.checkpoint import Checkpoint
from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError, PromotionSection, SearchConfig, TextSection, parse_config
from orchestrator.evaluation.long_context import NUM_TEXTS
from orchestrator.evaluation.task_files import SHIPPED
from orchestrator.promotion import promote
from orchestrator.promotion.measuring import _recut, limit_violations
from orchestrator.promotion.state import PROMOTED, REFUSED
from orchestrator.reporting.card import CARD
from orchestrator.search.trials.context import SearchSession, TrialContext
from orchestrator.search.validation import check_extras, check_tasks
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import DONE, TrialRecord
from orchestrator.tracking.runs import Tracker
from orchestrator.tracking.sync import MlflowSync, parent_run
from trainers.text.data import write_sequences


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Sixteen items of a shipped task."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = (SHIPPED["demo"] / "next_line.jsonl").read_text().splitlines()[:16]
    (folder / "next_line.jsonl").write_text("\n".join(lines) + "\n")
    shutil.copy(SHIPPED["demo"] / "next_line.yaml", folder)
    return folder


def parsed(folder: Path, demo_dir: Path, **promotion: Any) -> SearchConfig:
    return parse_config(
        {
            "name": "small",
            "model": {"path": str(demo_dir)},
            "search": {"recipes": ["gqa", "headfold"], "kv_ratios": [0.5]},
            "rungs": {"steps": [0, 4]},
            "promotion": {"tasks": [str(folder)], **promotion},
        }
    )


def promoted(
    config: SearchConfig, demo_dir: Path, demo_model: PreTrainedModel, tmp_path: Path, tracker: Tracker
) -> tuple[dict[str, Any], SearchFolder]:
    """A promotion of the demo model with pairs of heads averaged, which breaks it, as if a search had made it."""
    folder = SearchFolder.fresh(tmp_path / "runs", "small")
    layer = LayerPlan((0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 1, 1, 2, 2, 3, 3))
    plan = AttentionPlan((layer,) * 4, head_dim=32)
    for name in ("head", "base"):
        checkpoint.save(convert(demo_model, plan), folder.trial(name) / "trained")
        (folder.trial(name) / "plan.json").write_text(plan.to_json())
    drawn = torch.randint(1000, (6, 100), generator=torch.Generator().manual_seed(0))
    write_sequences(drawn, tmp_path / "eval")
    write_json(folder.original, {"loss": 2.0, "model": str(demo_dir)})
    write_json(folder.state, {"parent_run": "none"})
    folder.snapshot.write_text("name: small\n")
    shared: dict[str, Any] = {"train_file": "", "calibration_file": "", "calibration_cache": "", "train": {}}
    shared |= {"eval_file": str(tmp_path / "eval"), "rungs": (0, 4), "dtype": "float32", "original_loss": 2.0}
    context = TrialContext(folder=str(folder.root), model=str(demo_dir), **shared)
    rungs = [{"step": 0, "loss": 3.0}, {"step": 4, "loss": 2.2, "kl": 0.1}]
    records = [("head", "headfold", 2.2), ("base", "gqa", 2.9)]
    created = [
        TrialRecord(
            name, recipe, 0.5, 1e-3, {}, status=DONE, rungs=[rungs[0], rungs[1] | {"loss": loss}], kv_bytes_per_token=1
        )
        for name, recipe, loss in records
    ]
    write_journal(folder.root, created)
    parent = parent_run(folder.root)
    parent.status, parent.run_id = None, tracker.start("search")
    session = SearchSession(config, folder, context, MlflowSync(lambda: tracker, parent), 1)
    (candidate,) = promote.promote_trials(session)["candidates"].values()
    return candidate, folder


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)


def test_a_longer_context_begins_as_a_text_does() -> None:
    rows = torch.arange(NUM_TEXTS * 256).view(-1, 64)
    again = _recut(rows, 256, [7, 8])
    assert again[:, :2].tolist() == [[7, 8]] * NUM_TEXTS
    assert torch.equal(again[:, 2:], rows.view(NUM_TEXTS, 256)[:, 2:])
    assert torch.equal(_recut(rows, 256, []), rows.view(NUM_TEXTS, 256))


@pytest.mark.extended
def test_scores_reach_mlflow_as_metrics_and_an_artifact(
    tasks: Path, demo_dir: Path, demo_model: PreTrainedModel, tmp_path: Path, tracker: Tracker
) -> None:
    config = parsed(tasks, demo_dir)
    candidate, folder = promoted(config, demo_dir, demo_model, tmp_path, tracker)
    assert candidate["status"] == PROMOTED, "without a limit a drop is told, not judged"
    assert candidate["gate"]["worth"] == "passed"
    own, original = (candidate["measured"]["tasks"][name]["next_line"] for name in ("checkpoint", "original"))
    assert own["items"] == original["items"] == 16
    assert own["acc"] < original["acc"]
    run = tracker.client.get_run(candidate["run_id"])
    assert run.data.metrics["task_next_line_acc"] == own["acc"]
    file = tracker.client.download_artifacts(candidate["run_id"], "tasks.json", str(tmp_path))
    assert json.loads(Path(file).read_text()) == candidate["measured"]["tasks"]
    card = (Path(candidate["model"]) / CARD).read_text()
    assert f"| next_line | acc | 16 | {own['acc']:.3f} ± " in card
    for name, loss in (("original model", 2.0), ("baseline gqa, trained for as many steps at most", 2.9)):
        assert f"| {name} | {loss:.3f} |" in card
    assert "stdlib-llama, converted to 50% of its KV cache, by recipe `headfold`" in card
    assert f"| tokens | {4 * config.train.batch_size * config.data.sequence_length:,} |" in card
    assert checkpoint.intact(candidate["model"])
    assert (
        json.loads((folder.promoted / "measured-original.json").read_text())["found"]["tasks"]["next_line"] == original
    )
    assert (
        candidate["measured"]["tasks"]["baseline"] == candidate["measured"]["tasks"]["checkpoint"]
    )  # the same weights


@pytest.mark.extended
def test_the_gate_refuses_a_drop_that_is_too_large(
    tasks: Path, demo_dir: Path, demo_model: PreTrainedModel, tmp_path: Path, tracker: Tracker
) -> None:
    config = parsed(tasks, demo_dir, max_task_drop=0.05)
    candidate, _ = promoted(config, demo_dir, demo_model, tmp_path, tracker)
    assert candidate["status"] == REFUSED
    assert not (Path(candidate["model"]) / CARD).exists()
    (reason,) = candidate["reasons"]
    assert reason.startswith("task next_line: accuracy is 0.")
    assert reason == candidate["gate"]["worth"]


def test_what_cannot_be_compared_is_refused_before_anything_starts(tasks: Path, demo_dir: Path) -> None:
    model = Checkpoint.open(demo_dir)
    check_tasks(parsed(tasks, demo_dir, max_task_drop=0.05), model)
    with pytest.raises(ConfigError, match=r"max_task_drop 0.1 needs tasks"):
        parse_config(parsed(tasks, demo_dir).model_dump() | {"promotion": {"max_task_drop": 0.1}})
    with pytest.raises(ConfigError, match=r"promotion\.tasks: 'gone' is no folder"):
        check_tasks(parsed(Path("gone"), demo_dir), model)
    file = tasks / "next_line.yaml"
    task = yaml.safe_load(file.read_text())
    task["metric_list"] = [{"metric": "brier_score", "aggregation": "brier_score", "higher_is_better": False}]
    file.write_text(yaml.safe_dump(task))
    check_tasks(parsed(tasks, demo_dir), model)
    with pytest.raises(ConfigError, match=r"max_task_drop: task 'next_line' has no accuracy.*brier_score"):
        check_tasks(parsed(tasks, demo_dir, max_task_drop=0.05), model)


def test_text_and_long_contexts_of_a_finalist_are_shown_with_the_others(
    tasks: Path, demo_dir: Path, demo_model: PreTrainedModel, tmp_path: Path, tracker: Tracker
) -> None:
    more: dict[str, Any] = {"tasks": [], "prompts": ["def read_lines(path):"], "context_lengths": [64, 72]}
    config = parsed(tasks, demo_dir, **more)
    candidate, _ = promoted(config, demo_dir, demo_model, tmp_path, tracker)
    assert candidate["status"] == PROMOTED and set(candidate["measured"]) == {"generations", "long_context"}
    (generation,) = candidate["measured"]["generations"]
    assert set(generation["texts"]) == {"checkpoint", "original", "baseline"}
    assert generation["parts_at"] is not None and generation["texts"]["baseline"] == generation["texts"]["checkpoint"]
    long = candidate["measured"]["long_context"]
    metrics = tracker.client.get_run(candidate["run_id"]).data.metrics
    for length in ("64", "72"):
        depths = [depth["recall"] for depth in long["recall"]["checkpoint"][length]]
        assert metrics[f"recall_at_{length}"] == pytest.approx(sum(depths) / len(depths))
    assert metrics["loss_last_positions"] == long["loss_by_position"]["checkpoint"][-1]["loss"]
    file = tracker.client.download_artifacts(candidate["run_id"], "generations.json", str(tmp_path))
    assert json.loads(Path(file).read_text()) == [generation]


def test_the_gate_judges_the_accuracies_of_named_filters() -> None:
    def scores(strict: float, flexible: float) -> dict[str, dict[str, float]]:
        named = {"exact_match.strict-match": strict, "exact_match.flexible-extract": flexible}
        return {"gsm8k": {"exact_match_stderr.strict-match": 0.5, **named}}

    measured: Any = {"tasks": {"original": scores(0.5, 0.75), "checkpoint": scores(0.5, 0.25)}}
    too_large = ["task gsm8k, exact_match.flexible-extract: accuracy is 0.500 below the original's, allowed are 0"]
    for limit, reasons in ((None, []), (0.5, []), (0.0, too_large)):
        section = PromotionSection(tasks=["gsm8k"], max_task_drop=limit)
        assert limit_violations(measured, section) == reasons


def test_the_gate_judges_recall() -> None:
    def recall(*depths: float) -> dict[str, list[dict[str, float]]]:
        return {"64": [{"recall": one} for one in depths]}

    scores = {"long_context": {"recall": {"checkpoint": recall(0.5, 0.75), "original": recall(1.0, 0.75)}}}
    too_large = ["context of 64: recall is 0.250 below the original's, allowed are 0.24"]
    for limit, reasons in ((None, []), (0.25, []), (0.24, too_large)):
        section = PromotionSection(context_lengths=[64], max_recall_drop=limit)
        assert limit_violations(scores, section) == reasons


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompts": ["x = 1; " * 300]}, r"promotion.prompts: .*for this model"),
        ({"context_lengths": [1024]}, r"promotion.context_lengths: must lie in .*512.*1024"),
        ({"context_lengths": [512]}, r"promotion.context_lengths: 512 take 4096 held-out tokens.*are 2048"),
    ],
)
def test_what_the_model_or_the_text_does_not_reach_is_refused(
    more: dict[str, Any], message: str, tasks: Path, demo_dir: Path
) -> None:
    config = parsed(tasks, demo_dir, **more)
    config = config.model_copy(update={"data": config.data.model_copy(update={"eval": TextSection(tokens=2048)})})
    with pytest.raises(ConfigError, match=message):
        check_extras(config, checkpoints.open_checkpoint(demo_dir))
    with pytest.raises(ConfigError, match=r"max_recall_drop 0.1 needs context_lengths"):
        parse_config(parsed(tasks, demo_dir).model_dump() | {"promotion": {"max_recall_drop": 0.1}})


def test_contexts_are_cut_from_whole_sequences(tasks: Path, demo_dir: Path) -> None:
    config = parsed(tasks, demo_dir, context_lengths=[512])

    def check(tokens: int) -> None:
        data = config.data.model_copy(update={"eval": TextSection(tokens=tokens), "sequence_length": 100})
        check_extras(config.model_copy(update={"data": data}), checkpoints.open_checkpoint(demo_dir))

    with pytest.raises(ConfigError, match=r"there are 4000 in whole sequences; set data.eval.tokens to 4100"):
        check(4099)
    check(4100)
