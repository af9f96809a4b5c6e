"""The folder of a search that has ended, with everything in it that a report shows, from made-up numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from journals import write_journal

from attention.plan import AttentionPlan
from attention.plan_parts import LayerPlan
from orchestrator.storage import records
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord

ORIGINAL: dict[str, Any] = {
    "loss": 2.219, "kv_bytes_per_token": 4096, "parameters": 3_688_704, "dtype": "bfloat16",
    "model": "/models/stdlib-llama", "digests": {"weights": "940e4bb975368087", "calibration": "ec304419a30267ae"},
}  # fmt: skip
LOSSES = {  # by recipe and KV ratio: at steps 0, 8, 24
    ("gqa", 0.5): (4.5, 3.1, 2.61), ("gqa", 0.25): (7.6, 4.9, 3.9), ("headfold_gqa", 0.5): (2.24, 2.23, 2.215),
    ("headfold_gqa", 0.25): (2.36, 2.32, 2.285), ("align", 0.5): (2.5, 2.41, 2.35), ("align", 0.25): (4.0, 3.3),
    ("joint-aa01", 0.5): (2.4, 2.3, 2.26), ("joint-bb02", 0.25): (2.9, 2.7, 2.52),
}  # fmt: skip
PROMPT = "def read_lines(path):"
SIMILARITY = {"means": {"key_raw": 0.1, "key_aligned": 0.45, "value_raw": 0.02, "value_aligned": 0.4}}


def finished_search(storage: Path, model: Path) -> SearchFolder:
    """`model`: a checkpoint that stands for what was promoted."""
    folder = SearchFolder.fresh(storage, "demo")
    trials = [_trial(i, *arm, losses) for i, (arm, losses) in enumerate(LOSSES.items())]
    trials.append(
        TrialRecord(
            "t0008", "asymgqa", 0.25, 3e-4, {}, status=records.FAILED, error="out of memory: 12 GiB" + " x" * 80
        )
    )
    write_journal(folder.root, trials)
    folder.snapshot.write_text("name: demo\nmodel: {path: /models/stdlib-llama}\nsearch: {kv_ratios: [0.5, 0.25]}\n")
    write_json(folder.original, ORIGINAL)
    write_json(folder.versions, {"torch": "2.13", "transformers": "5.23"})
    write_json(folder.state, {"command": "headfold search demo.yaml", "started": "2026-11-23T10:00", "seconds": 754})
    plan = AttentionPlan((LayerPlan((0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 1, 1, 2, 2, 3, 3)),) * 4, 32)
    for trial in trials[:-1]:
        folder.trial(trial.trial_id).mkdir(parents=True)
        (folder.trial(trial.trial_id) / "plan.json").write_text(plan.to_json())
    entries = [_entry(trials[2], 2.21, str(model)), _entry(trials[3], 2.271, str(model)), _refused(trials[5])]
    write_json(folder.promotion, {"candidates": {entry["trial_id"]: entry for entry in entries}})
    return folder


def _trial(number: int, recipe: str, kv_ratio: float, losses: tuple[float, ...]) -> TrialRecord:
    start = 1_790_000_000 + 60 * number
    rungs = [
        {"step": step, "rung": i, "loss": loss, "kl": loss - 2, "seconds": 30.0 * (i + 1), "tokens": 2048 * step,
         "timestamp": start + 45 * (i + 1)}
        for i, (step, loss) in enumerate(zip((0, 8, 24), losses, strict=False))
    ]  # fmt: skip
    return TrialRecord(
        f"t{number:04}", recipe, kv_ratio, 3e-4, {"grouping": "exact"}, rungs=rungs, seed=0, similarity=SIMILARITY,
        status=records.DONE if len(losses) == 3 else records.STOPPED, kv_bytes_per_token=int(4096 * kv_ratio),
        seconds={"load": 2.0, "plan": 9.0, "convert": 3.0, "evaluate": 4.0}, run_id=f"run{number}",
        plan_digest="0a1b2c",
    )  # fmt: skip


def _entry(trial: TrialRecord, loss: float, model: str) -> dict[str, Any]:
    checkpoint, original = (
        {"acc": 0.594, "acc_stderr": 0.062, "items": 64},
        {"acc": 0.656, "acc_stderr": 0.06, "items": 64},
    )
    names = ("checkpoint", "original", "baseline")
    recall = [{"depth": d, "recall": 0.75, "margin": 1.4, "margin_stderr": 0.2} for d in (0.0, 0.5, 1.0)]
    positions = [{"from": 32 * i, "to": 32 * i + 32, "loss": 2.4 - 0.1 * i} for i in range(8)]
    texts = {
        name: f'{name}\n    """Lines of a file, without their ends, however long the line is."""\n' for name in names
    }
    measured = {
        "tasks": {name: {"next_line": original if name == "original" else checkpoint} for name in names},
        "long_context": {
            "loss_by_position": dict.fromkeys(names, positions),
            "recall": {name: {"128": recall} for name in names},
        },
        "generations": [{"prompt": PROMPT, "tokens": 48, "parts_at": 3, "parts": {}, "texts": texts}],
    }
    return {
        "trial_id": trial.trial_id, "recipe": trial.recipe, "kv_ratio": trial.kv_ratio, "steps": 64,
        "status": "promoted",
        "loss": loss, "untrained_loss": 2.3, "last_loss": loss + 0.01, "best_step": 34, "baseline_loss": 3.2,
        "baseline_step": 64, "original_loss": ORIGINAL["loss"], "shipped": "weights after step 34", "model": model,
        "exported": model, "plain": True, "kv_bytes_per_token": trial.kv_bytes_per_token, "measured": measured,
        "version": "1", "model_uri": "models:/headfold-demo/1", "folder": "/runs/x", "checks": {},
    }  # fmt: skip


def _refused(trial: TrialRecord) -> dict[str, Any]:
    reasons = ["held-out loss 3.2000 is not below the baseline's 3.1000 by more than 0, each at its best step"]
    return {
        "trial_id": trial.trial_id, "recipe": trial.recipe, "kv_ratio": trial.kv_ratio, "steps": 64,
        "status": "refused",
        "loss": 3.2, "baseline_loss": 3.1, "original_loss": ORIGINAL["loss"], "reasons": reasons,
    }  # fmt: skip
