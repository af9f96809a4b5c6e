"""The estimate of a conversion: made from the config alone, and near what a conversion layer by layer then takes."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from verbs import announce, convert_checkpoint, estimate_conversion, needs_layerwise

from attention.base.text import gib
from attention.io import checkpoint
from benchmarks.models import llama
from benchmarks.needs.memory import measured
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.estimate import RunEstimate
from orchestrator.resources import estimate
from orchestrator.resources.estimate import ConversionEstimate, Estimate, Machine
from orchestrator.resources.size import Conversion, Size
from orchestrator.resources.time import matmul_rate, search_phase_operations
from search_spaces.recipes.catalogue import recipe

GIGA = 2**30
SEVEN_B = {"num_attention_heads": 32, "head_dim": 128, "intermediate_size": 11_008, "vocab_size": 32_000}
SMALL: dict[str, Any] = {"calibration_tokens": 1024, "eval_tokens": 512, "sequence_length": 128, "device": "cpu"}


def of(config: LlamaConfig, name: str = "headfold_gqa", ratio: float = 0.25, tokens: int = 16_384, **changes: Any):
    conversion = Conversion(config, recipe(name, **changes), ratio, tokens, 4096, 256, torch.bfloat16)
    return ConversionEstimate.of(conversion, Machine(0), base=500 * 2**20)


def test_the_parameters_are_those_of_the_checkpoint(demo_dir: Path, demo_model: Any) -> None:
    size = Size.of(checkpoint.load_config(demo_dir))
    assert size.total == sum(p.numel() for p in demo_model.parameters())
    assert size.layer == sum(p.numel() for p in demo_model.model.layers[0].parameters())


def test_the_streamed_peak_does_not_grow_with_depth_and_the_other_does() -> None:
    shallow, deep = (of(llama(layers, SEVEN_B, tie_word_embeddings=False)) for layers in (4, 32))
    assert deep.layerwise == shallow.layerwise
    assert deep.resident > 5 * shallow.resident
    assert deep.layerwise < 0.2 * deep.resident
    assert deep.parameters == pytest.approx(6.74e9, rel=0.01)
    shallow, deep = (of(llama(layers, SEVEN_B, tie_word_embeddings=False), "headfold") for layers in (4, 32))
    assert deep.layerwise == shallow.layerwise


def test_on_a_gpu_the_statistics_are_in_the_memory_of_the_machine() -> None:
    conversion = Conversion(
        llama(32, SEVEN_B, tie_word_embeddings=False), recipe("headfold_gqa"), 0.25, 16_384, 4096, 256, torch.bfloat16
    )
    here = ConversionEstimate.of(conversion, Machine(0), base=0)
    machine = Machine(80 * GIGA, on_gpu=True, elsewhere=True)
    on_gpu = ConversionEstimate.of(conversion, machine, base=0)
    one_layer = conversion.statistics() + conversion.sums()
    assert on_gpu.host >= 32 * one_layer > 31 * one_layer >= here.resident - on_gpu.resident > 20 * one_layer
    assert not on_gpu.too_large and "of the machine's" in on_gpu.memory
    assert replace(on_gpu, host_available=on_gpu.host // 4).too_large
    run = RunEstimate.of([replace(on_gpu, host_available=on_gpu.host - 1)], None, several=False, layerwise=False)
    with pytest.raises(ConfigError, match="memory: the statistics of this conversion take about .* of the machine's"):
        run.check()


def test_statistics_are_stored_as_the_memory_allows() -> None:
    conversion = Conversion(
        llama(32, SEVEN_B, tie_word_embeddings=False), recipe("headfold_gqa"), 0.25, 16_384, 4096, 256, torch.bfloat16
    )
    much, little = (ConversionEstimate.of(conversion, Machine(size * GIGA), base=0) for size in (1000, 40))
    assert little.resident < 0.8 * much.resident


def test_of_alternatives_only_the_largest_counts() -> None:
    points = [of(llama(4, SEVEN_B), ratio=ratio) for ratio in (0.5, 0.25)]
    one, both = (
        RunEstimate.of(points, "out", several=False, layerwise=False, alternatives=alternatives).total
        for alternatives in (True, False)
    )
    assert one == Estimate(both.memory, points[0].disk, max(p.in_memory.seconds for p in points), one.scratch)
    assert both.disk == sum(point.disk for point in points) and both.seconds > one.seconds


def test_requests_make_it_larger_or_smaller() -> None:
    config = llama(4, SEVEN_B)
    base = of(config)
    assert of(config, "gqa").layerwise < base.layerwise
    assert of(config, tokens=262_144).layerwise > base.layerwise
    assert of(config, tokens=262_144).flops > base.flops
    assert of(config, **{"refinement.fit_steps": 4}).flops < base.flops
    assert of(config, ratio=0.5).disk > base.disk


def test_only_the_config_is_read(demo_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((demo_dir / "config.json").read_text())
    result = estimate_conversion(tmp_path, "headfold_gqa", 0.25, **SMALL)
    assert result.layerwise_possible
    assert result.disk > 0
    planned = estimate_conversion(tmp_path, "headfold", 0.25, **SMALL)
    assert planned.layerwise_possible and planned.flops > result.flops and planned.scratch > result.scratch
    assert planned.stages["sensitivity"] > 0 and "sensitivity" not in result.stages
    measured = {"allocation.increases": "measured"}
    refused = estimate_conversion(tmp_path, "headfold", 0.25, recipe_settings=measured, **SMALL)
    assert not refused.layerwise_possible
    assert "allocation.increases=measured" in refused.why_not
    json.dumps(asdict(refused))


def test_a_model_that_does_not_fit_is_streamed_by_itself(
    demo_dir: Path, tmp_path: Path, little_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not needs_layerwise(demo_dir, "gqa", 0.5, tmp_path / "out", **SMALL)
    monkeypatch.setattr(estimate, "available_bytes", lambda device=None: 2**20)
    assert needs_layerwise(demo_dir, "gqa", 0.5, tmp_path / "out", **SMALL)
    assert needs_layerwise(demo_dir, "headfold", 0.5, tmp_path / "out", **SMALL)
    # It cannot be, so it is tried in memory
    assert not needs_layerwise(demo_dir, "directshare", 1.0, tmp_path / "out", **SMALL)
    texts = {"calibration_data": little_text, "eval_data": little_text}
    record = convert_checkpoint(demo_dir, "gqa", 0.5, tmp_path / "out", layerwise=None, **SMALL, **texts)
    assert record["layerwise"]
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()


def test_it_is_reported_first_and_what_does_not_fit_is_refused(
    demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    announce(demo_dir, "headfold", [0.5, 0.25], out, layerwise=None, **SMALL)
    output = capsys.readouterr().err
    assert re.fullmatch(r"estimate: about \d+ (s|min), \d\.\d\d GiB of memory, 0\.\d\d GiB of disk\n", output), output
    monkeypatch.setattr(estimate, "available_bytes", lambda device: 2**20)
    refused = r"memory: this conversion does not fit: it takes about \d\.\d\d GiB, and 0\.00 GiB are available; "
    with pytest.raises(ConfigError, match=refused + "layer by layer it would be"):
        announce(demo_dir, "gqa", [0.5], out, layerwise=None, **SMALL)
    with pytest.raises(ConfigError, match=refused + ".*sharing"):
        announce(demo_dir, "directshare", [1.0], None, layerwise=None, **SMALL)
    monkeypatch.undo()
    monkeypatch.setattr("orchestrator.conversion.estimate.disk_free", lambda folder: 1000)
    with pytest.raises(ConfigError, match=r"out: the result does not fit.*0\.00 GiB are free at .*out"):
        announce(demo_dir, "gqa", [0.5], out, layerwise=None, **SMALL)
    announce(demo_dir, "gqa", [0.5], None, layerwise=None, **SMALL)  # nothing is written


def test_where_memory_is_not_known_what_is_reported_is_what_is_done(
    demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on systems without /proc: the conversion runs in memory, so that is what the estimate is of."""
    monkeypatch.setattr(estimate, "available_bytes", lambda device: 0)
    monkeypatch.setattr(estimate, "memory_now", lambda: GIGA)
    assert not needs_layerwise(demo_dir, "gqa", 0.5, tmp_path / "out", **SMALL)
    point = estimate_conversion(demo_dir, "gqa", 0.5, **SMALL)
    announce(demo_dir, "gqa", [0.5], tmp_path / "out", layerwise=None, **SMALL)
    assert point.resident != point.layerwise
    assert f", {gib(point.resident)} of memory, {gib(point.disk)} of disk" in capsys.readouterr().err


def test_the_rate_of_this_machine_is_measured_once() -> None:
    assert matmul_rate(torch.float32, 64) == matmul_rate(torch.float32, 64) > 0


def test_what_follows_shares_memory_and_adds_time_and_disk() -> None:
    first, second = Estimate(memory=3, disk=5, seconds=1.0, scratch=2), Estimate(memory=4, disk=6, seconds=2.0)
    assert first + second == Estimate(memory=4, disk=11, seconds=3.0, scratch=2)
    assert Estimate(2**30, 2**29, 90.0, 2**28).describe() == "about 2 min, 1.00 GiB of memory, 0.75 GiB of disk"


@pytest.mark.extended
@pytest.mark.parametrize("recipe_name", ["headfold_gqa", "headfold"])
def test_peak_memory_is_as_estimated(recipe_name: str, tmp_path: Path) -> None:
    """In a separate process; neighbours, which cost no time to group."""
    config = llama(2, {"num_attention_heads": 8, "head_dim": 96, "intermediate_size": 1200, "vocab_size": 2048})
    options = ["--calibration-tokens", "512", "--eval-tokens", "256", "--sequence-length", "128"]
    options += ["--set", "refinement.fit_steps=2", "--set", "grouping=neighbour"]
    output, done = measured(config, tmp_path, *options, recipe=recipe_name)
    assert 0.75 < done["peak_memory"] / output["layerwise"] < 1.25


def test_dhas_search_phase_counts() -> None:
    config = llama(32, SEVEN_B)
    conversion = Conversion(config, recipe("dha", **{"objective.steps": 10}), 0.25, 16_384, 4096, 512, torch.bfloat16)
    assert conversion.search_phase_tokens == 10 * 8 * 512
    parameters = Size.of(config).total  # each head has a KV head already
    operations = search_phase_operations(conversion, Size.of(config))
    assert 6 * parameters < operations / conversion.search_phase_tokens < 1.5 * 6 * parameters
    gqa = replace(conversion, recipe=recipe("gqa"))
    assert gqa.search_phase is None and search_phase_operations(gqa, Size.of(config)) == 0
    # Weights, gradients and two moments of a copy, in addition to the model
    added = of(config, "dha").resident - of(config, "gqa").resident
    assert 16 * parameters < added < 1.5 * 16 * parameters
    few = replace(conversion, calibration_tokens=3 * 512)
    assert (few.search_phase.batch_size, few.search_phase.device_batch_size) == (3, 3)


@pytest.mark.extended
def test_peak_memory_is_that_of_one_layer(tmp_path: Path) -> None:
    """12 layers (64M parameters) against 4 of the same width, each converted in a separate process."""
    shape = {"num_attention_heads": 8, "head_dim": 96, "intermediate_size": 1200, "vocab_size": 2048}
    options = ["--calibration-tokens", "1024", "--eval-tokens", "256", "--sequence-length", "128"]
    options += ["--set", "refinement=heal", "--set", "grouping=merge"]
    peaks = []
    for layers in (4, 12):
        config = llama(layers, shape, tie_word_embeddings=False)
        output, done = measured(config, tmp_path / str(layers), *options)
        assert 0.75 < done["peak_memory"] / output["layerwise"] < 1.25
        peaks.append(done["peak_memory"])
    layer = 2 * Size.of(config).layer
    assert peaks[1] - peaks[0] < 3 * layer  # eight layers more; each is `layer` bytes of weights alone
