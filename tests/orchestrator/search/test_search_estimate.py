"""The estimate of a search, before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from attention.io import checkpoint
from orchestrator.config.schema import SearchConfig, read_search_config
from orchestrator.main import app
from orchestrator.resources import search_estimate, time
from orchestrator.resources.search_estimate import SearchEstimate
from orchestrator.resources.size import Size
from orchestrator.search.estimate import estimate_search, local_parallel
from orchestrator.search.setup import SearchSetup
from orchestrator.tasks.estimate import OF_CONVERSION

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIGS = REPOSITORY / "configs"


def config_of(name: str, *changes: str) -> SearchConfig:
    model = f"model.path={REPOSITORY / 'examples' / 'stdlib-llama'}"
    return read_search_config(CONFIGS / f"{name}.yaml", [model, "resources.tokens_per_second=1000", *changes])


def of(config: SearchConfig, tmp_path: Path, **more: Any) -> SearchEstimate:
    return estimate_search(SearchSetup.open(config, weights=False), tmp_path, **more)


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of a matrix product, which a busy machine has less of."""
    monkeypatch.setattr(time, "matmul_rate", lambda dtype: 1e11)


def test_trials_and_tokens_are_counted(tmp_path: Path) -> None:
    """papers.yaml, counted by hand: 39 pairs of arm and budget and the baseline at 100 %, x 2 rates x 2 seeds, and x 2
    objectives but for the three of align, which has its own."""
    config = config_of("papers")
    result = of(config, tmp_path)
    trials = (37 * 2 + 3) * 2 * 2
    assert result.trials == trials
    assert result.tokens == result.tokens_most == trials * 36 * 8 * 128
    assert result.search_phases == 2, "one of DHA for each seed, for all its arms"
    assert result.search_phase_tokens == 2 * 60 * 8 * 128
    assert "search phase of DHA" in [need.process for need in result.processes]
    joint = of(config_of("joint"), tmp_path)
    assert (joint.search_phases, joint.search_phase_tokens) == (1, 60 * 8 * 128), "of the objectives that are sampled"
    assert of(config_of("papers", "search.distillations=[none]"), tmp_path).trials == 40 * 2 * 2
    assert result.trainings == 0


def test_a_baseline_of_fewer_bytes_is_reported(tiny_model: Any, tmp_path: Path) -> None:
    """Half of three KV heads per layer: one each, or one and two by turns."""
    model = tiny_model("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=48, vocab_size=2048)
    checkpoint.save(model, tmp_path / "model", REPOSITORY / "examples" / "stdlib-llama")
    search = ["search.recipes=[gqa,headfold_layers,headfold_gqa]", f"model.path={tmp_path / 'model'}"]
    uneven = of(config_of("demo", *search, "search.kv_ratios=[0.5,0.34]"), tmp_path)
    assert [warning for warning in uneven.warnings if "baseline" in warning] == [
        "search.kv_ratios: at 0.5 the baseline gqa keeps 33.33% of the cache at most, headfold_layers up to 50%: their "
        "losses are of different sizes; choose a KV ratio that all reach, or set search.strict to refuse others"
    ]
    assert not of(config_of("demo", *search, "search.kv_ratios=[0.34]"), tmp_path).warnings


def test_halving_stops_some_and_the_baseline_never(tmp_path: Path) -> None:
    config = config_of("demo")
    result = of(config, tmp_path)
    assert result.trials == 14
    a_step = 8 * 256
    # 2 baselines and 2 relaxations continue; of 10 others a half remains at the first rung, a quarter at the second
    assert result.tokens == (4 * 24 + 5 * 8 + 5 * 16 // 2) * a_step + 6 * 40 * a_step
    assert result.tokens_most == 14 * 24 * a_step + 6 * 40 * a_step
    assert result.trainings == 6  # the best two and the baseline of two budgets


def test_a_searcher_with_probes_trains_only_what_it_finds(tmp_path: Path) -> None:
    config = config_of(
        "demo", "search.searcher=asymgqa", "search.num_samples=40", "search.search_space={}", "search.params={}"
    )
    result = of(config, tmp_path)
    assert result.probes == 40
    assert result.trials == 12 + 40 + 2
    # The two are never stopped, like the 2 baselines and 2 relaxations: 8 others are
    assert result.tokens == (6 * 24 + 4 * 8 + 2 * 16) * 8 * 256 + 6 * 40 * 8 * 256


def test_hours_and_price_follow_the_rate(tmp_path: Path) -> None:
    slow, fast = (of(config_of("demo", f"resources.tokens_per_second={r}"), tmp_path) for r in (100, 1000))
    assert slow.rate_from == "configured"
    assert slow.cpu_hours and fast.cpu_hours and slow.hours and fast.hours
    assert slow.cpu_hours > 5 * fast.cpu_hours
    priced = of(config_of("demo", "resources.price_per_hour=2"), tmp_path)
    assert priced.price == pytest.approx(2 * priced.cpu_hours)
    assert of(config_of("demo"), tmp_path, parallel=2).hours == pytest.approx(fast.hours / 2)


def test_gpus_that_are_named_are_those_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    config = config_of("demo", "train.gpus_per_worker=1", "resources.trial_gpus=0", "resources.max_concurrent=auto")
    assert local_parallel(config) == 1
    assert local_parallel(config, 8) == local_parallel(config, 8, "H100") == 8


def test_what_cannot_fit_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("demo")
    assert of(config, tmp_path).warnings == ()
    monkeypatch.setattr(search_estimate, "available_bytes", lambda: 2**28)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**20))
    memory, disk = of(config, tmp_path).warnings
    assert "memory" in memory and "resources.max_concurrent" in memory
    assert "disk" in disk and str(tmp_path) in disk


def test_memory_falls_with_stage_and_micro_batch(tmp_path: Path) -> None:
    def worker(*changes: str) -> int:
        return of(config_of("demo", *changes), tmp_path).worker_bytes

    assert worker("train.micro_batch_size=1") < worker()
    # With stage 3 as much is whole at once as is allowed, by default all of a model as small as this
    little = "train.deepspeed={zero_optimization: {stage3_max_live_parameters: 0, stage3_prefetch_bucket_size: 0}}"
    given = [["train.num_workers=4", f"train.zero_stage={stage}", little] for stage in (1, 2, 3)]
    stages = [worker(*changes) for changes in (["train.num_workers=4", "train.zero_stage=0"], *given)]
    assert stages == sorted(stages, reverse=True) and len(set(stages)) == 4


def test_memory_has_a_teacher_only_where_something_is_distilled(tmp_path: Path) -> None:
    def worker(*changes: str) -> int:
        return of(config_of("demo", "search.recipes=[gqa]", *changes), tmp_path).worker_bytes

    weights = 4 * Size.of(checkpoint.load_config(REPOSITORY / "examples" / "stdlib-llama")).total
    assert worker("train.distillation=kl") - worker("train.distillation=none") == pytest.approx(weights, rel=1e-6)
    split = [worker(f"train.distillation={d}", "train.zero_stage=3", "train.num_workers=4") for d in ("kl", "none")]
    assert split[0] - split[1] == pytest.approx(weights / 4 + weights, rel=1e-6)  # its part, and what is whole in use
    distilling = "search.recipes=[{recipe: gqa, params: {recovery.distillation: kl}}]"
    assert worker("train.distillation=none", distilling) == worker("train.distillation=kl")
    assert worker("train.activation_checkpointing=true") < worker()


def test_workers_with_gpus_are_not_measured_on_a_machine_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("demo", "train.gpus_per_worker=1", "resources.tokens_per_second=null")
    monkeypatch.setattr(time.torch.cuda, "is_available", lambda: False)
    result = of(config, tmp_path)
    assert result.rate is None and result.hours is None
    assert "resources.tokens_per_second" in result.describe(config)["rate"]


def test_the_rate_is_measured_where_it_can_be(tmp_path: Path) -> None:
    config = config_of(
        "demo", "resources.tokens_per_second=null", "train.micro_batch_size=1", "data.sequence_length=64"
    )
    result = of(config, tmp_path)
    assert result.rate_from == "measured here"
    assert result.rate and result.rate > 0


def test_the_verb_reports_either_way_and_refuses_half(tmp_path: Path) -> None:
    changes = [f"model.path={REPOSITORY / 'examples' / 'stdlib-llama'}", "resources.tokens_per_second=1000"]
    record = tmp_path / "estimate.json"
    for first in ([str(CONFIGS / "demo.yaml")], ["--config", str(CONFIGS / "demo.yaml")]):
        done = CliRunner().invoke(app, ["estimate", *first, *changes, "--json", str(record)])
        assert done.exit_code == 0, done.output
        assert "trials: 14" in done.output
        assert json.loads(record.read_text())["trials"] == 14
    with pytest.raises(ValueError, match=OF_CONVERSION.split(":")[0]):
        CliRunner().invoke(app, ["estimate", "--model", "x"], catch_exceptions=False)
    with pytest.raises(ValueError, match="parts of both"):
        CliRunner().invoke(app, ["estimate", str(CONFIGS / "demo.yaml"), "--model", "x"], catch_exceptions=False)
