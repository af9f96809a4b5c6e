"""`search.tensor_parallel`: bytes per GPU replace those of the whole model; what cannot or need not be tried."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import run_here
from engine_plans import together
from transformers import AutoConfig

from attention.plan import AttentionPlan
from attention.tensor_parallel import RankLayoutError
from orchestrator.config.schema import PER_GPU, SearchConfig, parse_config
from orchestrator.reporting.tables import PER_GPU_COLUMN, trial_table
from orchestrator.search.estimate import ratios_without_saving
from orchestrator.search.leftovers import select
from orchestrator.search.setup import SearchSetup
from orchestrator.search.trials.context import TrialContext
from orchestrator.storage.records import DONE, TrialRecord, best_per_budget, front

DATA = {"sequence_length": 32, "train": {"tokens": 640}, "eval": {"tokens": 320}, "calibration": {"tokens": 320}}


def config(demo_dir: Path, ranks: int, **search: Any) -> SearchConfig:
    section = {"target": "vllm", "tensor_parallel": ranks, "recipes": ["gqa"], "kv_ratios": [0.5, 0.25, 0.125]}
    model = {"path": str(demo_dir)}
    return parse_config({"name": "tp", "model": model, "data": DATA, "search": section | search, "storage": "unused"})


@pytest.mark.parametrize(
    ("ranks", "search", "message"),
    [
        (3, {}, "search.tensor_parallel: got 3, and the checkpoint itself does not fit: 8 query heads"),
        (4, {"target": "any"}, "search.target=any names no engine; set search.target=vllm"),
        (4, {"target": "gguf"}, "search.target=gguf is for llama.cpp"),
        (2, {"kv_ratios": [0.375]}, "gqa at 37.5%: 3 KV heads cannot be divided among 2 GPUs"),
        (
            2,
            {"recipes": ["gqa", {"recipe": "headfold_layers", "params": {"allocation.counts": "all"}}]},
            "headfold_layers may give a layer 3, 5, 7 KV heads",
        ),
    ],
)
def test_what_no_gpus_can_hold_is_refused(demo_dir: Path, ranks: int, search: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        _ = SearchSetup.open(config(demo_dir, ranks, **search)).problem
    assert message in str(caught.value)


@pytest.mark.parametrize(("ranks", "idle"), [(1, None), (2, "12.5%"), (4, "25%, 12.5%"), (8, "50%, 25%, 12.5%")])
def test_ratios_that_save_nothing_on_a_gpu_are_listed_before_the_search(
    demo_dir: Path, ranks: int, idle: str | None
) -> None:
    """Of 8 KV heads a GPU stores 8/N; of n it stores n/N, and one at least."""
    warnings = ratios_without_saving(SearchSetup.open(config(demo_dir, ranks)))
    assert bool(warnings) == (idle is not None)
    for warning in warnings:
        assert f"on {ranks} GPUs the KV ratio(s) {idle} take as many bytes per GPU" in warning


def test_a_trial_reports_the_bytes_of_one_gpu(demo_dir: Path) -> None:
    context = TrialContext("", "", "float16", "", "", "", "", (0,), {}, 0.0, target="vllm", tensor_parallel=4)
    model = AutoConfig.from_pretrained(demo_dir)
    four, two, one = (tuple(head * count // 8 for head in range(8)) for count in (4, 2, 1))
    plan = AttentionPlan(together(four, two, one, tuple(range(8))), 32)
    # By hand: layers of 4, 2, 1 and 8 KV heads on 4 GPUs leave 1, 1, 1 and 2 pairs of 32 numbers of 2 bytes on each.
    assert context.engine_facts(model, plan) == {PER_GPU: (1 + 1 + 1 + 2) * 2 * 32 * 2}
    assert replace(context, tensor_parallel=1).engine_facts(model, plan) == {}
    three = tuple(min(head // 3, 2) for head in range(8))
    with pytest.raises(RankLayoutError, match="9 query heads cannot be divided among 2 GPUs"):  # 8, padded
        uneven = AttentionPlan(together(three, three, three, three), 32)
        replace(context, tensor_parallel=2).engine_facts(model, uneven)


def trial(name: str, ratio: float, loss: float, whole: int, each: int | None) -> TrialRecord:
    record = TrialRecord(name, "gqa", ratio, 1e-3, {}, DONE, kv_bytes_per_token=whole, kv_bytes_per_token_per_gpu=each)
    record.add({"step": 0, "loss": loss})
    return record


def test_the_front_and_the_choice_count_the_bytes_of_a_gpu(demo_dir: Path) -> None:
    on_four = [trial("half", 0.5, 2.0, 2048, 512), trial("quarter", 0.25, 3.0, 1024, 512)]
    assert [t.trial_id for t in front(on_four)] == ["half"]
    assert best_per_budget(on_four) == {0.5: on_four[0]}
    assert select(on_four, "best_per_budget", 2) == [on_four[0]]
    on_two = [trial("half", 0.5, 2.0, 2048, 1024), trial("quarter", 0.25, 3.0, 1024, 512)]
    assert [t.trial_id for t in front(on_two)] == ["quarter", "half"]
    assert list(best_per_budget(on_two)) == [0.5, 0.25]
    whole = [trial("half", 0.5, 2.0, 2048, None), trial("quarter", 0.25, 1.0, 1024, None)]
    assert list(best_per_budget(whole)) == [0.5, 0.25], "without tensor parallelism every budget has its best"
    original: Any = {"loss": 1.0}
    assert PER_GPU_COLUMN in trial_table(on_four, original).columns
    assert PER_GPU_COLUMN not in trial_table(whole, original).columns
    assert config(demo_dir, 2).objectives == ("loss", PER_GPU)
    assert config(demo_dir, 1, target="any").objectives == ("loss", "kv_bytes_per_token")


@pytest.mark.extended
def test_a_search_for_four_gpus(
    demo_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ray_cluster: None
) -> None:
    file = tmp_path / "search.yaml"
    record = config(demo_dir, 4).model_dump(mode="json", exclude_unset=True)
    record |= {"storage": str(tmp_path / "runs"), "rungs": {"steps": [0]}, "promotion": {"enabled": False}}
    file.write_text(json.dumps(record))
    assert run_here("search", file, "data.source=stdlib", "search.cache_formats=[]", "--json", tmp_path / "s.json") == 0
    assert "the KV ratio(s) 25%, 12.5% take as many bytes per GPU" in capsys.readouterr().err
    result = json.loads((tmp_path / "s.json").read_text())
    own = result["original"]["kv_bytes_per_token_per_gpu"]
    assert own == result["original"]["kv_bytes_per_token"] / 4
    assert {t["kv_ratio"]: t[PER_GPU] / own for t in result["trials"]} == {0.5: 0.5, 0.25: 0.5, 0.125: 0.5}
    (best,) = result["front"]
    assert result["best_per_budget"] == {"0.5": best}
