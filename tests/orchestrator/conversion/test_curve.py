"""Several ratios in one call: one calibration, one measurement, the front as checkpoints, JSON and picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from verbs import convert_curve

from attention.calibration import calibrate as calibrating
from attention.io import checkpoint
from attention.modeling.model_classes import plan_of
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError
from orchestrator.conversion import memory_store
from orchestrator.conversion.request import requested_ratios
from search_spaces.planning.context import PlanningContext
from search_spaces.recipes.catalogue import recipe
from trainers.evaluation import evaluate
from trainers.text.data import Texts

SMALL: dict[str, Any] = {"calibration_tokens": 2048, "eval_tokens": 1024, "sequence_length": 128, "device": "cpu"}


@pytest.fixture(scope="module", autouse=True)
def texts(little_text: str) -> None:
    SMALL.update(calibration_data=little_text, eval_data=little_text)


@pytest.mark.extended
def test_one_calibration_and_one_measurement_for_all_ratios(
    tmp_path: Path, demo_dir: Path, little_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    calibrate, increases_of = calibrating.calibrate, PlanningContext.increases_of
    monkeypatch.setattr(memory_store, "calibrate", lambda *a, **k: calls.append("calibrate") or calibrate(*a, **k))

    def counted(self: Any, recipe: Any, plans: Any, *a: Any, **k: Any) -> list[float]:
        calls.extend(["loss_increase"] * len(plans))
        return increases_of(self, recipe, plans, *a, **k)

    monkeypatch.setattr(PlanningContext, "increases_of", counted)
    knobs = {"allocation.tokens": 256, "allocation.fit_steps": 0}
    chosen = recipe("gqa", fusion="least_squares", together=False, allocation="knapsack", **knobs)
    record = convert_curve(demo_dir, chosen, [0.25, 0.9, 0.5], tmp_path / "out", **SMALL)
    assert calls.count("calibrate") == 1
    assert calls.count("loss_increase") == 8 * 3  # eight sites, three counts below eight heads
    points = record["points"]
    assert [point["kv_ratio_asked"] for point in points] == [0.9, 0.5, 0.25]
    assert [point["kv_ratio"] for point in points] == [57 / 64, 0.5, 0.25]  # 0.9 is no whole number of heads
    losses = [point["loss"] for point in points]
    assert losses == sorted(losses) and losses[0] < record["original_loss"] + 0.1
    assert record["kv_bytes_per_token_original"] == 4 * points[2]["kv_bytes_per_token"]
    written = json.loads((tmp_path / "out" / "curve.json").read_text())
    assert written["points"] == json.loads(json.dumps(points))
    assert (tmp_path / "out" / "curve.png").read_bytes()[:4] == b"\x89PNG"
    for point in points:
        saved = checkpoint.load(tmp_path / "out" / f"kv-{point['kv_ratio_asked']:g}", torch.float32)
        assert plan_of(saved).kv_ratio == point["kv_ratio"]
    tokenizer = checkpoints.load_tokenizer(demo_dir)
    texts = Texts(little_text).load(tokenizer, 512, eval_tokens=1024, sequence_length=128, calibrate=False)
    assert evaluate(saved, texts.held_out).loss == pytest.approx(losses[-1], abs=1e-4)


def test_ratios_that_mean_the_same_budget_are_converted_once(demo_dir: Path) -> None:
    record = convert_curve(demo_dir, "gqa", [0.9, 0.6, 0.5], None, **SMALL)
    assert [(p["kv_ratio_asked"], p["kv_ratio"], p["out"]) for p in record["points"]] == [
        (0.9, 7 / 8, None),
        (0.5, 0.5, None),
    ]


def test_what_is_no_list_of_ratios_is_refused() -> None:
    assert requested_ratios("no model", "0.5, 0.25,0.5", None) == [0.5, 0.25]
    for text in ("half", ",", "0.5;0.25"):
        with pytest.raises(ConfigError, match="expected a share like 0.5 or 50%, or a list"):
            requested_ratios("no model", text, None)
