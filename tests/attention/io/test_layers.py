"""Metrics of attention outputs with one layer in memory: those of the whole model, and the files on disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.conversion.sensitivity import output_metrics
from attention.io.checkpoint import load_config
from attention.io.layers import metrics
from attention.io.layers.metrics import metric_file, read_metric, write_metrics
from attention.io.layers.windows import LazyWeights

CPU = torch.device("cpu")
FAMILIES = ["gemma2", "gpt2", "gpt_neox", "gpt_oss", "llama", "olmo2", "opt", "phi3", "qwen3", "smollm3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_the_whole_model(
    family: str, tiny_model: Callable[..., PreTrainedModel], tiny_tokens: Tensor, tmp_path: Path
) -> None:
    model = tiny_model(family, num_hidden_layers=3)
    model.save_pretrained(tmp_path / "model")
    config, folder = load_config(tmp_path / "model"), tmp_path / "metrics"
    folder.mkdir()
    seen: list[tuple[int, int]] = []

    def write() -> None:
        weights = LazyWeights(tmp_path / "model", config)
        write_metrics(weights, config, tiny_tokens[:5], torch.float32, CPU, folder, lambda *done: seen.append(done))

    write()
    assert seen == [(done, 6) for done in range(1, 7)]
    assert sorted(path.name for path in folder.iterdir()) == [metric_file(folder, i).name for i in range(3)]
    for layer, expected in enumerate(output_metrics(model, tiny_tokens[:5])):
        torch.testing.assert_close(read_metric(folder, layer), expected, rtol=1e-3, atol=1e-6 * float(expected.max()))
    write()
    assert len(seen) == 6, "what is there is not made again"


def test_metrics_without_the_gradients_below_them_are_made_again(
    tiny_model: Callable[..., PreTrainedModel], tiny_tokens: Tensor, tmp_path: Path
) -> None:
    """As a killed call of a former version left them."""
    tiny_model("llama", num_hidden_layers=3).save_pretrained(tmp_path / "model")
    config, folder = load_config(tmp_path / "model"), tmp_path / "metrics"
    folder.mkdir()

    def write() -> None:
        weights = LazyWeights(tmp_path / "model", config)
        write_metrics(weights, config, tiny_tokens[:5], torch.float32, CPU, folder, lambda *_: None)

    write()
    expected = [read_metric(folder, layer) for layer in range(3)]
    metric_file(folder, 0).unlink()
    write()
    for layer in range(3):
        torch.testing.assert_close(read_metric(folder, layer), expected[layer])


@pytest.mark.parametrize("fatal", range(1, 16))
def test_a_killed_call_is_continued(
    fatal: int, tiny_model: Callable[..., PreTrainedModel], tiny_tokens: Tensor, tmp_path: Path, monkeypatch: Any
) -> None:
    """Killed before each change of the folder: three inputs, gradients and metrics written, six files removed."""
    model = tiny_model("llama", num_hidden_layers=3)
    model.save_pretrained(tmp_path / "model")
    config, folder = load_config(tmp_path / "model"), tmp_path / "metrics"
    folder.mkdir()
    seen: list[int] = []
    changes = itertools.count(1)

    def write() -> None:
        weights = LazyWeights(tmp_path / "model", config)
        write_metrics(weights, config, tiny_tokens[:5], torch.float32, CPU, folder, lambda done, _: seen.append(done))

    def counted(function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            if next(changes) == fatal:
                raise KeyboardInterrupt
            function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(metrics, "write_shard", counted(metrics.write_shard))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        with pytest.raises(KeyboardInterrupt):
            write()
    write()
    assert len(seen) <= 7, "at most one layer is computed twice"
    assert sorted(path.name for path in folder.iterdir()) == [metric_file(folder, i).name for i in range(3)]
    for layer, expected in enumerate(output_metrics(model, tiny_tokens[:5])):
        torch.testing.assert_close(read_metric(folder, layer), expected, rtol=1e-3, atol=1e-6 * float(expected.max()))
