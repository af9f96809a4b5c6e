"""Rung 0 and the original model's score take as many sequences at once as the training does, and less out of memory.

Out of memory is an injected torch.OutOfMemoryError: there is no GPU here to fill. Of Tune's calls only a trial's report
is made in this process; it is appended to a list.
"""

from __future__ import annotations

import json
import os
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from attention.io import checkpoint
from orchestrator.search.candidates import Candidate
from orchestrator.search.trials import trial, untrained
from orchestrator.search.trials.context import TrialContext
from orchestrator.search.trials.conversions import ConversionLibrary
from orchestrator.search.trials.rungs import ReportRungs
from orchestrator.search.trials.trial import run_trial
from orchestrator.search.trials.untrained import shared_parts
from search_spaces.recipes.catalogue import recipe
from trainers.settings import TrainSettings
from trainers.text.data import write_sequences

NOTE = "out of memory with 4 sequences at once: evaluated with 2"


@pytest.fixture
def context(tiny_model: Any, tmp_path: Path) -> TrialContext:
    model, file = tmp_path / "model", tmp_path / "tokens.safetensors"
    checkpoint.save(tiny_model("llama"), model)
    write_sequences(torch.randint(0, 64, (9, 16), generator=torch.Generator().manual_seed(0)), file)
    return TrialContext(
        folder=str(tmp_path), model=str(model), dtype="float32", train_file=str(file), eval_file=str(file),
        calibration_file=str(file), calibration_cache=str(tmp_path / "cache"), rungs=(0,),
        train=TrainSettings(batch_size=8, micro_batch_size=4).model_dump(mode="json"), original_loss=4.0,
    )  # fmt: skip


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences whole models have run at once."""
    forward, rows = LlamaForCausalLM.forward, []

    def counted(self: Any, input_ids: Any = None, **more: Any) -> Any:
        rows.append(len(input_ids))
        return forward(self, input_ids, **more)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    return rows


def reports_of(context: TrialContext, name: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = []
    here = SimpleNamespace(get_trial_id=lambda: name)
    monkeypatch.setattr(trial, "tune", SimpleNamespace(get_context=lambda: here, report=reports.append))
    run_trial(Candidate(recipe("gqa"), 0.5, 1e-3).config(), context)
    return reports


def test_rung_zero(context: TrialContext, tried: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    shared_parts.cache_clear()
    (calm,) = reports_of(context, "calm", monkeypatch)
    assert max(tried) == 4 and "notes" not in calm
    forward = LlamaForCausalLM.forward

    def limited(self: Any, input_ids: Any = None, **more: Any) -> Any:
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, input_ids, **more)

    monkeypatch.setattr(LlamaForCausalLM, "forward", limited)
    shared_parts.cache_clear()
    ConversionLibrary.of_search(context.folder).remove()  # or it would have no need to measure
    (short,) = reports_of(context, "short", monkeypatch)
    shared_parts.cache_clear()
    assert short["notes"] == [NOTE]
    for name in ("loss", "kl", "loss_increase"):
        assert short[name] == pytest.approx(calm[name], abs=1e-6)
    stored = json.loads((Path(context.folder) / "trials" / "short" / "facts.json").read_text())
    assert stored["notes"] == [NOTE], "a trial that is resumed still says so"


def test_later_reports_keep_the_note_and_add_their_own(context: TrialContext) -> None:
    rungs = ReportRungs(context, {"notes": [NOTE]}, 0)
    report = rungs.complete({"step": 0, "loss": 4.5, "notes": ["trained with 2"]})
    assert report is not None and report["notes"] == [NOTE, "trained with 2"]
    assert "notes" not in (ReportRungs(context, {}, 0).complete({"step": 0, "loss": 4.5}) or {})


def test_a_large_original_is_gone_before_the_converted_model_is_cast(
    context: TrialContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted weights have separate memory, and at that time only one model may exist."""
    shared_parts.cache_clear()
    monkeypatch.setattr(untrained, "KEEP_BELOW", 0)
    original = weakref.ref(shared_parts(context).original.model)
    there: list[bool] = []
    cast = untrained.cast_weights

    def looked(*arguments: Any) -> None:
        there.append(original() is not None)
        cast(*arguments)

    monkeypatch.setattr(untrained, "cast_weights", looked)
    reports_of(context, "large", monkeypatch)
    assert there == [False]


def test_a_trial_plans_on_the_cores_that_its_worker_trains_on(context: TrialContext) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert trial.planning_threads(context) == 1
        two = replace(context, train=dict(context.train) | {"cpus_per_worker": 1.9})
        assert trial.planning_threads(two) == min(2, len(os.sched_getaffinity(0)))
        assert trial.planning_threads(replace(two, device="auto")) == 1
    finally:
        torch.set_num_threads(before)
