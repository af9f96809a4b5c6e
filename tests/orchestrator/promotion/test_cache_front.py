"""The front of a search in engine bytes: its measurements, their storage and display."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journals import write_journal
from promotions import trial

from attention.cache_formats import CachePair
from attention.checkpoint import Checkpoint
from attention.engine_cache import engine_cache
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError, SearchConfig, parse_config
from orchestrator.promotion import engine_caches
from orchestrator.promotion.engine_caches import cache_pairs, measure_engine_caches
from orchestrator.reporting.figures.caches import caches_figure
from orchestrator.reporting.pages.report_page import write_report
from orchestrator.reporting.tables import cache_table
from orchestrator.search.trials.context import SearchControl, SearchSession, TrialContext
from orchestrator.storage.cache_points import BASELINE_ROLE, ORIGINAL_ROLE, TRIAL_ROLE, engine_front, read_cache_points
from orchestrator.storage.json_files import read_json, write_json
from orchestrator.storage.paths import SearchFolder
from trainers.evaluation import evaluate
from trainers.text.data import read_sequences

pytestmark = pytest.mark.usefixtures("in_this_process")


def session_of(config: SearchConfig, folder: SearchFolder, context: TrialContext) -> SearchSession:
    mlflow: Any = None
    return SearchSession(config, folder, context, mlflow, 1)


def test_original_front_and_baseline_are_measured_once_in_every_format(
    config: SearchConfig, folder: SearchFolder, context: TrialContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [trial("head", "headfold", 2.2), trial("base", "gqa", 2.9)]
    session = session_of(config, folder, context)
    points = measure_engine_caches(session, trials)
    assert {(p["role"], p["cache_format"]) for p in points} == {
        (role, name) for role in (ORIGINAL_ROLE, TRIAL_ROLE, BASELINE_ROLE) for name in ("f16", "fp8")
    }
    by_name = {(p["role"], p["cache_format"]): p for p in points}
    plan = Checkpoint.open(context.model).plan
    in_16_bits = by_name[ORIGINAL_ROLE, "f16"]
    assert in_16_bits["kv_bytes_per_token"] == plan.kv_bytes_per_token("float16") and in_16_bits["share"] == 1
    assert abs(in_16_bits["loss_increase"]) < 1e-3
    assert by_name[TRIAL_ROLE, "f16"]["share"] == 0.5 and by_name[TRIAL_ROLE, "fp8"]["share"] == 0.25
    # By hand: the weights of the trial under the format, and the error over sequences of the difference
    held_out = read_sequences(context.eval_file)[:]
    model = checkpoints.load_working(str(folder.trial("head") / "trained"), "float32", "cpu")
    original = checkpoints.load_working(context.model, "float32", "cpu")
    with engine_cache(model, CachePair.parse("fp8")):
        losses = evaluate(model, held_out).sequence_losses
    exact = evaluate(original, held_out).sequence_losses
    assert losses is not None and exact is not None
    point = by_name[TRIAL_ROLE, "fp8"]
    assert point["loss"] == pytest.approx(float(losses.mean()), abs=1e-9)
    assert point["loss_increase"] == pytest.approx(float((losses - exact).mean()), abs=1e-9)
    assert point["loss_increase_stderr"] == pytest.approx(float((losses - exact).std()) / 3**0.5, abs=1e-9)

    stored = read_json(folder.engine_caches)["measurements"][context.model]
    assert "blocks of 32" in stored["why_not"]["q8_0"], "heads that a format does not hold are left out with the reason"
    monkeypatch.setattr(engine_caches, "measure_formats", None)
    assert measure_engine_caches(session, trials) == points == read_cache_points(folder)


def test_a_model_that_cannot_be_measured_costs_no_search_its_end(
    config: SearchConfig,
    folder: SearchFolder,
    context: TrialContext,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Earlier measurements are reused."""
    trials = [trial("head", "headfold", 2.2), trial("base", "gqa", 2.9)]
    session, real = session_of(config, folder, context), engine_caches.measure_formats

    def measure(path: str, *rest: Any) -> Any:
        if path != context.model:
            raise RuntimeError("out of memory")
        return real(path, *rest)

    monkeypatch.setattr(engine_caches, "measure_formats", measure)
    assert {point["role"] for point in measure_engine_caches(session, trials)} == {ORIGINAL_ROLE}
    assert "out of memory" in capsys.readouterr().out

    def measure_others(path: str, *rest: Any) -> Any:
        assert path != context.model, "it was measured before"
        return real(path, *rest)

    monkeypatch.setattr(engine_caches, "measure_formats", measure_others)
    assert {point["role"] for point in measure_engine_caches(session, trials)} == {
        ORIGINAL_ROLE,
        TRIAL_ROLE,
        BASELINE_ROLE,
    }


def test_weights_that_are_only_at_the_address_are_fetched_and_missing_ones_end_no_search(
    config: SearchConfig, folder: SearchFolder, context: TrialContext, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = [trial("head", "headfold", 2.2), trial("base", "gqa", 2.9)]
    weights = folder.trial("head") / "trained" / "model.safetensors"
    moved = weights.rename(folder.root / "moved")
    fetched: list[set[str]] = []

    def fetch(names: Collection[str]) -> None:
        fetched.append(set(names))
        if len(fetched) > 1:
            moved.rename(weights)

    session = replace(session_of(config, folder, context), control=SearchControl(fetch=fetch))
    assert TRIAL_ROLE not in {point["role"] for point in measure_engine_caches(session, trials)}
    assert "not measured, nor what came after" in capsys.readouterr().out
    assert TRIAL_ROLE in {point["role"] for point in measure_engine_caches(session, trials)}
    assert fetched == [{"head", "base"}] * 2


def test_the_page_shows_them(config: SearchConfig, folder: SearchFolder, context: TrialContext) -> None:
    trials = [trial("head", "headfold", 2.2), trial("base", "gqa", 2.9)]
    write_journal(folder.root, trials)
    points = measure_engine_caches(session_of(config, folder, context), trials)
    table = cache_table(points)
    assert len(table.rows) == len(points) and len(table.marked) == len(engine_front(points))
    assert "--kv-cache-dtype fp8" in table.rows[-1][-1]
    assert caches_figure(points) is not None and caches_figure([]) is None
    write_json(folder.original, read_json(folder.original) | {"kv_bytes_per_token": 256})
    page = Path(write_report(folder.root)["report"]).read_text(encoding="utf-8")
    assert "Loss increase against engine bytes" in page and "Models and cache formats" in page


def test_formats_follow_the_engine(config: SearchConfig) -> None:
    def names(**search: Any) -> list[str]:
        section = config.model_dump()["search"] | search
        return [p.name for p in cache_pairs(parse_config(config.model_dump() | {"search": section}).search)]

    assert names() == ["f16", "q8_0", "fp8", "q8_0,q4_0", "q4_0"]
    assert names(target="vllm") == ["f16", "fp8"]
    assert names(target="llama.cpp") == ["f16", "q8_0", "q8_0,q4_0", "q4_0"]
    assert names(target="transformers") == names(cache_formats=[]) == []
    assert names(cache_formats=["Q8_0, q4_0"]) == ["q8_0,q4_0"]
    with pytest.raises(ConfigError, match="no engine supports keys in fp8"):
        names(cache_formats=["fp8,q4_0"])


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=12))
def test_the_front_is_what_nothing_beats(values: list[tuple[int, int]]) -> None:
    points: Any = [{"kv_bytes_per_token": size, "loss": loss} for size, loss in values]
    result = [(p["kv_bytes_per_token"], p["loss"]) for p in engine_front(points)]
    unbeaten = {
        (size, loss)
        for size, loss in values
        if not any(s <= size and x <= loss and (s, x) != (size, loss) for s, x in values)
    }
    assert result == sorted(unbeaten)
