"""Metrics of attention outputs with one layer in memory: those of the whole model, and the files on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.conversion.sensitivity import output_metrics
from attention.io.checkpoint import load_config
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
