"""Increases of the loss measured by Ray tasks, a layer each: the same file as one process makes."""

from __future__ import annotations

import json
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from orchestrator import checkpoints
from orchestrator.search.candidates import Candidate
from orchestrator.search.prepare import curve_tasks, measure_layer, measure_on_workers
from orchestrator.search.trials.context import TrialContext
from search_spaces.planning.curves import CurvePoint, Curves, CurveSite
from search_spaces.recipes.catalogue import recipe
from trainers.text.data import load_sequences, write_sequences

KNOBS = {"allocation.tokens": 128, "allocation.fit_steps": 0}
KNAPSACK = recipe("gqa", fusion="least_squares", together=False, allocation="knapsack", **KNOBS)


def test_a_task_for_each_layer_of_each_set_of_curves() -> None:
    one = Candidate(KNAPSACK, 0.5, 1e-3)
    same = [replace(one, kv_ratio=0.25), replace(one, learning_rate=1e-4)]
    others = [replace(one, seed=1)]
    others += [replace(one, recipe=KNAPSACK.with_changes(**change)) for change in ({"fusion": "mean"}, {"width": 2})]
    without = [Candidate(recipe("gqa"), 0.5, 1e-3), replace(one, seed=2, plan="{}")]
    tasks = curve_tasks([one, *same, *others, *without], 3)
    assert len(tasks) == 3 * 4
    assert [layer for _, layer in tasks] == [0, 1, 2] * 4
    assert [candidate for candidate, _ in tasks[::3]] == [one, *others]


def test_processes_that_write_at_once_keep_each_others_points(tmp_path: Path) -> None:
    file = tmp_path / "curves-x.json"
    spawned = get_context("fork")
    writers = [spawned.Process(target=_write, args=(file, layer)) for layer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert len(json.loads(file.read_text())) == 4 * 25
    assert {f.name for f in tmp_path.iterdir()} == {file.name, ".lock"}


def _write(file: Path, layer: int) -> None:
    for count in range(1, 26):
        known: dict[str, CurvePoint] = {}
        curves = Curves(lambda *_: ((0,),), lambda result, _: [0.5] * len(result), known, file, units=100)
        curves.of([CurveSite(layer, ("key",))], [count])


@pytest.mark.extended
@pytest.mark.slow
def test_tasks_leave_what_one_process_leaves(
    ray_cluster: None, demo_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = load_sequences(
        "stdlib", checkpoints.load_tokenizer(demo_dir), split="calibration", tokens=512, sequence_length=64
    )
    file = tmp_path / "tokens"
    write_sequences(tokens, file)
    base = TrialContext(
        folder=str(tmp_path), model=str(demo_dir), dtype="float32", train_file=str(file), eval_file=str(file),
        calibration_file=str(file), calibration_cache=str(tmp_path / "spread"), rungs=(0,), train={},
        original_loss=2.2,
    )  # fmt: skip
    tasks = curve_tasks([Candidate(KNAPSACK, 0.5, 1e-3)], 4)
    measure_on_workers(tasks, base, {"num_cpus": 1})
    assert "increases of the loss: 4 layers measured" in capsys.readouterr().out
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = replace(base, calibration_cache=str(tmp_path / "alone"))
        assert [measure_layer(task, alone) for task in tasks] == [2 * 4] * 4  # 1, 2, 4 and all 8 heads
    finally:
        torch.set_num_threads(threads)
    (spread,), (serial,) = ((tmp_path / name).glob("curves-*.json") for name in ("spread", "alone"))
    assert spread.name == serial.name
    result, expected = (json.loads(path.read_text()) for path in (spread, serial))
    assert result.keys() == expected.keys() and len(result) == 4 * 2 * 3
    for key, (increase, partition) in expected.items():
        assert result[key][0] == pytest.approx(increase, abs=1e-6) and result[key][1] == partition
