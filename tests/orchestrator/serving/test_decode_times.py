"""Decode time as an objective: measured in llama.cpp, looked up for plans, and a whole search that is for an engine.

Nothing is asserted of how fast anything is.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from search_process import LITTLE, start_search

from attention.io import checkpoint
from attention.io.targets import EngineSupport, target
from orchestrator import checkpoints
from orchestrator.config.schema import DECODE, ConfigError, parse_config
from orchestrator.search.validation import validate_search
from orchestrator.serving import decode_times, speed
from orchestrator.serving.decode_times import DecodeTimes, divisors, equal_plan, measure_decode_times
from orchestrator.storage.json_files import read_json


def test_a_plan_takes_the_mean_of_its_layers() -> None:
    """1 head: 10 ms, 2: 12, 8: 24, so 5 are halfway between: 18. Layers of 1, 2, 5, 8: (10 + 12 + 18 + 24) / 4."""
    times = DecodeTimes("gguf", "llama.cpp", "0", 64, (1, 2, 8), (0.010, 0.012, 0.024))
    assert times.of(EngineSupport.of((1, 2, 5, 8), 32)) == pytest.approx(0.016)
    assert times.of(EngineSupport((1, 2), (3, 8), 32)) == pytest.approx((0.012 + 0.018) / 2)  # 2 and 5 on average


def test_plans_of_every_divisor() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.extended
def test_the_engine_is_timed_at_every_divisor(demo_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setattr(decode_times, "TOKENS", 4)
    times = measure_decode_times(str(demo_dir), "gguf", 64, "float32")
    assert (times.engine, times.context_length, times.heads) == ("llama.cpp", 64, (1, 2, 4, 8))
    assert all(0 < seconds < 10 for seconds in times.seconds)
    geometry, config = checkpoints.open_checkpoint(demo_dir).geometry, checkpoint.load_config(demo_dir)
    for heads, seconds in zip(times.heads, times.seconds, strict=True):
        assert times.of(target("gguf").support_for(config, equal_plan(geometry, heads))) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "search.target any: which engine.*llama.cpp"),
        ({"target": "llama.cpp", "decode_context_length": 513}, "got 513, expected more than the 32.*at most the 512"),
        ({"target": "llama.cpp", "decode_context_length": 32}, "got 32, expected more than the 32"),
        ({"target": "vllm"}, "vLLM is not installed.*make engines"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    changes: dict[str, object], message: str, demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADFOLD_VLLM_PYTHON", raising=False)
    section = {"kv_ratios": [0.5], "recipes": ["gqa"], "decode_context_length": 128} | changes
    settings = {"name": "small", "model": {"path": str(demo_dir)}, "search": section, "storage": str(tmp_path)}
    with pytest.raises(ConfigError, match=f"search.decode_context_length.*{message}"):
        validate_search(parse_config(settings))


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_search_for_llama_cpp_has_three_objectives_and_ends_in_it(tmp_path: Path) -> None:
    requested = [
        *("search.target=llama.cpp", "search.decode_context_length=128", "search.recipes=[gqa, headfold_gqa]"),
        *("rungs.steps=[0, 4, 8]", "rungs.scheduler=front", "promotion.steps=4", "train.dtype=fp32"),
    ]
    process = start_search(tmp_path, [*LITTLE, *requested], "--json", str(tmp_path / "outcome.json"))
    output, _ = process.communicate(timeout=580)
    assert process.returncode == 0, output
    assert "decode time of llama.cpp at context 128" in output and "decode ms/token" in output
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    times = read_json(Path(outcome["folder"]) / "decode_times.json")
    lowest, highest = min(times["seconds"]), max(times["seconds"])
    trials = {t["trial_id"]: t for t in outcome["trials"]}
    assert len(trials) == 6 and all(lowest <= t[DECODE] <= highest for t in trials.values())
    promoted = [c for c in outcome["promotion"]["candidates"].values() if c["status"] == "promoted"]
    assert promoted
    for one in promoted:
        assert one["checks"]["engine"] == "llama.cpp"
        assert one["checks"]["engine_kv_bytes_per_token"] == one["checks"]["engine_kv_bytes_per_token_promised"]
        assert one["checks"]["engine_kv_bytes_per_token"] == trials[one["trial_id"]]["kv_bytes_per_token"]
