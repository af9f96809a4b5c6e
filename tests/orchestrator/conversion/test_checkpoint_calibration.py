"""Statistics of a checkpoint in files: made layer by layer from disk, found again unread, smaller where need be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.calibration import calibrate as calibrating_module
from attention.calibration.calibrate import calibrate
from attention.calibration.moments import STATISTICS, LayerStatistics
from attention.calibration.sizes import MIXED, layer_bytes
from attention.calibration.store import META, Calibration, assemble_calibration
from attention.checkpoint import Checkpoint
from attention.families import geometry_of
from attention.io import checkpoint
from benchmarks.models import llama
from benchmarks.needs.memory import random_checkpoint
from orchestrator.conversion import calibration
from orchestrator.conversion.calibration import CalibrationPass, Workers, calibrate_on_workers, checkpoint_calibration

Tiny = Callable[..., PreTrainedModel]
FAMILIES = ["gemma", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "qwen2", "qwen3"]
FLOAT: dict[str, Any] = {"dtype": "float32", "device": "cpu"}


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 64, (12, 24), generator=torch.Generator().manual_seed(5))


def assert_close(one: LayerStatistics, other: LayerStatistics) -> None:
    assert one.tokens == other.tokens
    for name in STATISTICS:
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-5, msg=name)


@contextmanager
def bytes_read() -> Iterator[SimpleNamespace]:
    """Bytes that this process reads from files meanwhile, from the page cache too; mapped files are not counted."""
    count = SimpleNamespace()
    before = int(Path("/proc/self/io").read_text().split()[1])
    yield count
    count.read = int(Path("/proc/self/io").read_text().split()[1]) - before


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_from_disk_is_the_model_in_memory(
    family: str, tiny_model: Tiny, tokens: Tensor, tmp_path: Path
) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    created = checkpoint_calibration(tmp_path / "model", tokens, tmp_path / "cache", **FLOAT)
    for one, other in zip(created.layers, calibrate(model, tokens).layers, strict=True):
        assert_close(one, other)


def test_layers_that_cannot_stand_alone_are_calibrated_in_memory(
    tiny_model: Tiny, tokens: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("gpt2", scale_attn_by_inverse_layer_idx=True)
    model.save_pretrained(tmp_path / "model")
    created = checkpoint_calibration(tmp_path / "model", tokens, tmp_path / "cache", **FLOAT)
    for one, other in zip(created.layers, calibrate(model, tokens).layers, strict=True):
        assert_close(one, other)
    monkeypatch.setattr("orchestrator.conversion.calibration.available_bytes", lambda: 1)
    small = checkpoint_calibration(tmp_path / "model", tokens, tmp_path / "another cache", **FLOAT)
    assert (created.mixed, small.mixed) == (MIXED[0], MIXED[-1]), "as the memory allows, not the disk"


@pytest.mark.heavy
def test_what_is_there_is_neither_read_nor_hashed_again(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 8, "head_dim": 32, "intermediate_size": 512, "vocab_size": 2048}
    random_checkpoint(llama(3, shape, tie_word_embeddings=False), tmp_path / "model")
    tokens = torch.randint(0, 2048, (8, 64), generator=torch.Generator().manual_seed(0))
    created = checkpoint_calibration(tmp_path / "model", tokens, tmp_path / "cache", **FLOAT)
    folder = tmp_path / "cache" / f"calibration-{created.digest}"
    files = sorted(folder.glob("layer-*.safetensors"))
    assert len(files) == 3 and min(file.stat().st_size for file in files) > 1_000_000

    def again(**known: Any) -> int:
        with bytes_read() as count:
            result = checkpoint_calibration(tmp_path / "model", tokens, tmp_path / "cache", **FLOAT, **known)
        assert result.digest == created.digest
        return count.read

    again()  # files as young as their note are hashed once more
    assert again() < 100_000  # configuration and notes: neither statistics nor weights
    os.utime(files[1])
    assert files[1].stat().st_size <= again(weights=created.weights) < files[1].stat().st_size + 100_000  # a copy, say
    assert again(weights=created.weights) < 100_000
    with bytes_read() as count:
        layer = Calibration.load(folder).layers[1]
        assert layer.mixed_moments[3].abs().sum() > 0
    assert count.read < 100_000  # mapped


@pytest.mark.heavy
def test_a_damaged_file_is_made_again(
    tiny_model: Tiny, tokens: Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    first = checkpoint_calibration(tmp_path / "model", tokens, tmp_path / "cache", **FLOAT)
    file = tmp_path / "cache" / f"calibration-{first.digest}" / "layer-0001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    mended = checkpoint_calibration(tmp_path / "model", tokens, tmp_path / "cache", **FLOAT)
    assert "the file is damaged" in (output := capsys.readouterr().err) and "calibrating again" in output
    assert mended.digest == first.digest
    assert_close(mended.layers[1], calibrate(tiny_model("llama"), tokens).layers[1])
    assert Calibration.load(file.parent).digest == first.digest


def test_a_cache_that_cannot_be_written_is_refused_before_the_pass(
    tiny_model: Tiny, tokens: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(calibrating_module, "collect", lambda *a, **k: pytest.fail("the pass ran"))
    with pytest.raises(OSError):
        checkpoint_calibration(tmp_path / "model", tokens, tmp_path / "file", **FLOAT, weights="known")


def test_weights_are_hashed_again_when_a_file_has_changed(tiny_model: Tiny, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    first = checkpoint.weights_digest(tmp_path / "model", tmp_path / "cache")
    assert first == checkpoint.weights_digest(tmp_path / "model")
    with bytes_read() as count:
        assert checkpoint.weights_digest(tmp_path / "model", tmp_path / "cache") == first
    assert count.read < 1000
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "model")
    assert checkpoint.weights_digest(tmp_path / "model", tmp_path / "cache") != first


@pytest.mark.heavy
@pytest.mark.parametrize("mixed", MIXED)
def test_the_way_is_chosen_by_what_is_free_and_then_stays(
    mixed: str, tiny_model: Tiny, tokens: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", num_attention_heads=16, num_key_value_heads=4)
    model.save_pretrained(tmp_path / "model")
    geometry = geometry_of(model.config)
    sizes = [2 * 2 * layer_bytes(geometry, tokens.numel(), way) for way in MIXED]  # two layers, half of what is free
    assert sizes == sorted(sizes, reverse=True)
    free = sizes[MIXED.index(mixed)]  # type: ignore[arg-type]
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    created = checkpoint_calibration(tmp_path / "model", tokens, tmp_path / "cache", **FLOAT)
    assert created.mixed == mixed
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**40))
    monkeypatch.setattr(calibrating_module, "collect", lambda *a, **k: pytest.fail("the pass ran again"))
    assert checkpoint_calibration(tmp_path / "model", tokens, tmp_path / "cache", **FLOAT).digest == created.digest


def test_smaller_ways_are_means_and_roundings_of_the_exact_one(tiny_model: Tiny, tokens: Tensor) -> None:
    model = tiny_model("qwen2", num_key_value_heads=2)
    exact, rounded, grouped, pooled = (calibrate(model, tokens, mixed=mixed).layers[0].mixed_moments for mixed in MIXED)
    assert torch.equal(rounded, exact.to(torch.bfloat16))
    torch.testing.assert_close(grouped, exact.unflatten(0, (2, 2)).mean(1))
    torch.testing.assert_close(pooled, exact.mean(0, keepdim=True))


@pytest.mark.heavy
def test_a_calibration_of_the_former_format_is_made_anew(
    tiny_model: Tiny, tokens: Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    created = checkpoint_calibration(tmp_path / "model", tokens, tmp_path / "cache", **FLOAT)
    note = tmp_path / "cache" / f"calibration-{created.digest}" / META
    note.write_text('{"format": 1, "sha256": "0"}')
    again = checkpoint_calibration(tmp_path / "model", tokens, tmp_path / "cache", **FLOAT)
    assert "expected format 2, got 1; calibrate again: calibrating again" in capsys.readouterr().err
    assert_close(again.layers[1], calibrate(tiny_model("llama"), tokens).layers[1])
    assert [p.name for p in (tmp_path / "cache").glob("calibration-*")] == [note.parent.name]


PEAK = """
import sys, torch
from orchestrator.conversion.calibration import checkpoint_calibration
from attention.base.memory import memory_peak
tokens = torch.randint(0, 2048, (8, 64), generator=torch.Generator().manual_seed(0))
made = checkpoint_calibration(sys.argv[1], tokens, sys.argv[2], dtype="float32")
for layer in made.layers:  # and read, one after the other
    float(layer.mixed_moments.sum() + layer.input_moment.sum())
print(memory_peak())
"""


@pytest.mark.extended
def test_memory_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    """12 layers against 3, made and read in a process each: the statistics of only one layer are in memory."""
    shape = {"num_attention_heads": 8, "head_dim": 96, "intermediate_size": 1200, "vocab_size": 2048}
    peaks = []
    for layers in (3, 12):
        config = llama(layers, shape, tie_word_embeddings=False)
        random_checkpoint(config, tmp_path / f"{layers}")
        command = [sys.executable, "-c", PEAK, str(tmp_path / f"{layers}"), str(tmp_path / "cache")]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]))
    one = layer_bytes(geometry_of(config), 512)
    assert one > 10e6
    assert peaks[1] - peaks[0] < 2 * one, "nine layers more, of which more than one would be held"


def dying(marks: Path) -> type:
    """A class of actors that end their process at the calls of which there is a file, once each."""

    def die_once(call: str) -> None:
        if (mark := marks / call).exists():
            mark.unlink()
            os._exit(1)

    class Dying(calibration._CalibrationActor):
        def advance(self, number: int, layer: int, entering: Any) -> Any:
            die_once(f"advance-{number}-{layer}")
            return super().advance(number, layer, entering)

        def merge(self, layer: int, folder: Path, *sums: Any) -> Any:
            die_once(f"merge-{layer}")
            return super().merge(layer, folder, *sums)

    return Dying


def by_workers(task: CalibrationPass, tokens: Tensor, count: int, folder: Path) -> list[LayerStatistics]:
    """The statistics of 7 sampled sequences of these, made by so many actors."""
    shared = partial(calibrate_on_workers, task, tokens, 7, Workers(count, {"num_cpus": 0.4 / count}))
    created = assemble_calibration(folder, shared, tokens.numel(), "digest", "weights", task.mixed)
    return list(created.layers)


@pytest.mark.extended
def test_statistics_are_the_same_for_any_number_of_workers_also_if_some_are_lost(
    ray_cluster: None, tiny_model: Tiny, tokens: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama", num_hidden_layers=3).save_pretrained(tmp_path / "model")
    task = CalibrationPass(Checkpoint.open(tmp_path / "model"), "float32", "cpu", "float32")
    one = by_workers(task, tokens[:11], 1, tmp_path / "one")
    marks = tmp_path / "marks"
    marks.mkdir()
    for call in ("advance-0-0", "advance-3-1", "merge-1"):
        (marks / call).touch()
    monkeypatch.setattr(calibration, "_CalibrationActor", dying(marks))
    two = by_workers(task, tokens[:11], 2, tmp_path / "two")
    for layer, other in zip(one, two, strict=True):
        assert all(torch.equal(getattr(layer, name), getattr(other, name)) for name in STATISTICS)


@pytest.mark.extended
@pytest.mark.parametrize("mixed", ["float32", "bfloat16", "pooled"])
def test_workers_that_share_the_sequences_are_one_process(
    mixed: Any, ray_cluster: None, tiny_model: Tiny, tokens: Tensor, tmp_path: Path
) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    model.save_pretrained(tmp_path / "model")
    task = CalibrationPass(Checkpoint.open(tmp_path / "model"), "float32", "cpu", mixed)
    shared = by_workers(task, tokens[:11], 2, tmp_path / "calibration")
    alone = calibrate(model, tokens[:11], sample_tokens=7 * 24, mixed=mixed)
    assert len(shared) == 3
    for one, other in zip(shared, alone.layers, strict=True):
        assert one.inputs.shape[0] == 7 and one.mixed_moments.dtype == other.mixed_moments.dtype
        if mixed == "bfloat16":  # a rounding more or less of a number on the edge
            scale = other.mixed_moments.abs().max()
            assert (one.mixed_moments - other.mixed_moments).abs().max() <= 2**-8 * scale
        else:
            assert_close(one, other)


@pytest.mark.extended
def test_a_conversion_from_files_is_the_one_in_memory(demo_dir: Path, tmp_path: Path) -> None:
    from verbs import convert_checkpoint

    small = {"calibration_tokens": 2048, "eval_tokens": 1024, "sequence_length": 64, "device": "cpu"}
    records = [
        convert_checkpoint(demo_dir, "least_squares", 0.5, dtype="float32", cache_dir=cache, **small)
        for cache in (None, tmp_path, tmp_path)
    ]
    assert len({record["plan_digest"] for record in records}) == 1
    assert records[1]["loss"] == pytest.approx(records[0]["loss"], abs=1e-5)
    assert records[2]["loss"] == records[1]["loss"] and records[1]["mixed_moments"] == "float32"
    assert len(list(tmp_path.glob(f"calibration-*/{META}"))) == 1
