"""A conversion is made once for all trials that begin with it, under any training settings."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention.io import checkpoint
from orchestrator.search.candidates import Candidate
from orchestrator.search.trials import trial, untrained
from orchestrator.search.trials.context import TrialContext
from orchestrator.search.trials.conversions import ConversionLibrary, conversion_key
from orchestrator.search.trials.trial import run_trial
from orchestrator.search.trials.untrained import shared_parts, untrained_facts
from orchestrator.storage.json_files import read_json
from search_spaces.recipes.catalogue import recipe
from trainers.settings import TrainSettings
from trainers.text.data import write_sequences

FIT = {"refinement": "fit_heal", "settings": {"refinement.fit_steps": 2}}


@pytest.fixture
def context(tiny_model: Any, tmp_path: Path) -> Iterator[TrialContext]:
    model, file = tmp_path / "model", tmp_path / "tokens.safetensors"
    checkpoint.save(tiny_model("llama"), model)
    write_sequences(torch.randint(0, 64, (9, 16), generator=torch.Generator().manual_seed(0)), file)
    shared_parts.cache_clear()
    yield TrialContext(
        folder=str(tmp_path), model=str(model), dtype="float32", train_file=str(file), eval_file=str(file),
        calibration_file=str(file), calibration_cache=str(tmp_path / "cache"), rungs=(0,),
        train=TrainSettings(batch_size=8, micro_batch_size=4).model_dump(mode="json"), original_loss=4.0,
    )  # fmt: skip
    shared_parts.cache_clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipe of each conversion that was made."""
    recipes: list[str] = []
    convert = untrained.convert_and_refine

    def counted(*arguments: Any) -> Any:
        recipes.append(arguments[0].name)
        return convert(*arguments)

    monkeypatch.setattr(untrained, "convert_and_refine", counted)
    return recipes


def report(context: TrialContext, name: str, candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Rung 0 of a trial, whose report Tune would get."""
    reports: list[dict[str, Any]] = []
    here = SimpleNamespace(get_trial_id=lambda: name)
    monkeypatch.setattr(trial, "tune", SimpleNamespace(get_context=lambda: here, report=reports.append))
    run_trial(dict(candidate.config()), context)
    return reports[0]


def shared(report: dict[str, Any]) -> dict[str, Any]:
    """The fields that are the same for trials of one conversion."""
    return {k: v for k, v in report.items() if k not in ("phases", "seconds", "seed", "conversion_cost")}


def weights(context: TrialContext, name: str) -> Path:
    (file,) = (Path(context.folder) / "trials" / name / "converted").glob("*.safetensors")
    return file


def test_one_conversion_for_all_learning_rates_and_seeds(
    context: TrialContext, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = replace(recipe("gqa").with_changes(**FIT), name="fitted")
    rates = {f"rate-{rate:g}": Candidate(arm, 0.5, rate) for rate in (1e-3, 3e-4, 1e-4)}
    reports = {name: report(context, name, c, monkeypatch) for name, c in rates.items()}
    assert made == ["fitted"]
    first, *others = reports.values()
    assert all(shared(other) == shared(first) for other in others)
    assert all(other["conversion_cost"] == first["conversion_cost"] for other in others)
    assert {"plan", "convert", "refine"} <= set(first["phases"]) and set(others[0]["phases"]) == {"reuse"}
    assert len({weights(context, name).stat().st_ino for name in rates}) == 1, "takes no more of the disk"
    # A recovery is no part of a conversion either, and each trial says its own recipe
    lora = replace(arm.with_changes(recovery="lora"), name="adapters")
    adapted = report(context, "lora", Candidate(lora, 0.5, 1e-3), monkeypatch)
    assert made == ["fitted"] and shared(adapted) == shared(first)
    folder = Path(context.folder) / "trials" / "lora" / "converted"
    assert checkpoint.note_of(folder)["recipe"]["name"] == "adapters" and checkpoint.intact(folder)
    # With another seed the plan is sought anew, and is the same
    seeded = report(context, "seed", Candidate(arm, 0.5, 1e-3, seed=1), monkeypatch)
    assert made == ["fitted"] and shared(seeded) == shared(first) and seeded["seed"] == 1
    # What differs in the conversion is made
    report(context, "other", Candidate(arm, 0.25, 1e-3), monkeypatch)
    assert made == ["fitted"] * 2


def test_a_shared_conversion_gives_the_losses_of_one_that_was_made(
    context: TrialContext, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Candidate(recipe("gqa"), 0.5, 1e-4)
    report(context, "first", replace(chosen, learning_rate=1e-3), monkeypatch)
    by_library = report(context, "taken", chosen, monkeypatch)
    ConversionLibrary.of_search(context.folder).remove()
    alone = report(context, "alone", chosen, monkeypatch)
    assert len(made) == 2 and shared(alone) == shared(by_library)
    digests = [read_json(weights(context, name).parent / "digests.json") for name in ("taken", "alone")]
    assert digests[0] == digests[1]


def test_a_damaged_or_removed_conversion_is_made_again(
    context: TrialContext, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = Candidate(recipe("gqa"), 0.5, 1e-3)
    library = ConversionLibrary.of_search(context.folder)
    report(context, "first", candidate, monkeypatch)
    (stored,) = library.root.glob("*/converted/*.safetensors")
    content = stored.read_bytes()
    stored.unlink()
    stored.write_bytes(content[:-1])
    report(context, "second", candidate, monkeypatch)
    assert len(made) == 2
    # Its weights are those of the second trial: they stay as long as somebody needs them
    key = conversion_key(candidate, context)
    library.remove_unneeded([])
    assert library.has(key), "a trial has the same file: nothing would be won"
    weights(context, "second").unlink()
    library.remove_unneeded([key])
    assert library.has(key)
    library.remove_unneeded([])
    assert not library.has(key)
    report(context, "third", candidate, monkeypatch)
    assert len(made) == 3


def test_a_trial_waits_for_who_makes_its_conversion(
    context: TrialContext, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = Candidate(recipe("gqa"), 0.5, 1e-3)
    library = ConversionLibrary.of_search(context.folder)
    key = conversion_key(candidate, context)
    reports: list[dict[str, Any]] = []
    with library.turn(key) as first:
        assert first
        with library.turn(key, wait=False) as second:
            assert not second
        waiting = threading.Thread(target=lambda: reports.append(report(context, "waits", candidate, monkeypatch)))
        waiting.start()
        untrained_facts(candidate, context, Path(context.folder) / "trials" / "makes")
        assert not reports
    waiting.join(60)
    assert len(made) == 1 and set(reports[0]["phases"]) == {"reuse"}


def test_without_hard_links_every_trial_makes_its_own(
    context: TrialContext, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError("no links on this file system")

    monkeypatch.setattr("orchestrator.search.trials.conversions.os.link", refused)
    for name in ("first", "second"):
        report(context, name, Candidate(recipe("gqa"), 0.5, 1e-3), monkeypatch)
    assert len(made) == 2
