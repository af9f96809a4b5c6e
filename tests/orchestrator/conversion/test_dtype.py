"""The checkpoint's dtype is preserved, and reports of it are true: conversion both ways, evaluation, gate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parameters import extended
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from verbs import convert_checkpoint, evaluate_checkpoint

from attention.io import checkpoint
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError, parse_config

Tiny = Callable[..., PreTrainedModel]
QUICK = {"refinement.fit_steps": 8}
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@pytest.fixture(scope="module")
def texts(little_text: str) -> dict[str, Any]:
    sizes = {"calibration_tokens": 768, "eval_tokens": 384, "sequence_length": 48, "device": "cpu"}
    return {"calibration_data": little_text, "eval_data": little_text, **sizes}


def stored(folder: Path) -> set[str]:
    result = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            result |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return result


@pytest.mark.parametrize(
    ("dtype", "requested", "kind"),
    [
        extended(torch.bfloat16, "auto", "BF16"),
        (torch.float16, "auto", "F16"),
        extended(torch.float32, "auto", "F32"),
        extended(torch.bfloat16, "fp32", "F32"),
        (torch.float32, "bf16", "BF16"),  # weights outside of the layers are rounded too
    ],
)
@pytest.mark.parametrize("layerwise", [False, True], ids=["memory", "layerwise"])
def test_the_report_of_a_conversion_is_true_of_its_file(
    layerwise: bool,
    dtype: torch.dtype,
    requested: str,
    kind: str,
    texts: dict[str, Any],
    tiny_model: Tiny,
    demo_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    model = tiny_model("llama", vocab_size=2048, tie_word_embeddings=dtype == torch.float16, dtype=dtype)
    source = checkpoint.save(model, tmp_path / "source", demo_tokenizer)
    settings = {**texts, "dtype": requested, "recipe_settings": QUICK, "layerwise": layerwise}
    report = convert_checkpoint(source, "headfold_gqa", 0.5, tmp_path / "out", **settings)
    assert stored(tmp_path / "out") == {kind}
    assert report["format"] == "stock" and report["loads_in"] == ["transformers", "vLLM", "llama.cpp"]
    assert checkpoint.load(tmp_path / "out").dtype == checkpoints.dtype_of(report["dtype"])
    width = checkpoints.dtype_of(report["dtype"]).itemsize
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * width
    assert report["cache_bytes_measured"] == report["kv_bytes_per_token"] * report["cache_tokens"]

    held_out = {key: value for key, value in texts.items() if key in ("eval_tokens", "sequence_length", "device")}
    held_out["data"] = texts["calibration_data"]  # of which a part is held out, as in the conversion
    result = evaluate_checkpoint(tmp_path / "out", source, speed_tokens=0, **held_out)
    assert result["dtype"] == report["dtype"]
    assert result["kv_bytes_per_token"] == report["kv_bytes_per_token"]
    assert result["cache_bytes_measured"] == result["kv_bytes_per_token"] * result["cache_tokens"]
    for name in ("loss", "original_loss", "kl"):
        assert report[name] == pytest.approx(result[name], rel=2e-6, abs=2e-6)


def test_the_requested_dtype(tiny_model: Tiny, tmp_path: Path) -> None:
    source = checkpoint.save(tiny_model("llama", dtype=torch.bfloat16), tmp_path / "model")
    for requested, result in (("auto", "bfloat16"), ("bf16", "bfloat16"), ("fp16", "float16"), ("float32", "float32")):
        assert checkpoints.written_dtype(source, requested) == result
        assert checkpoints.working_dtype(result) == "float32"
    with pytest.raises(ConfigError, match=r"dtype must be auto or one of .*'bf16'.*got 'int8'"):
        checkpoints.written_dtype(source, "int8")


def test_a_configuration_takes_both_names_and_keeps_one() -> None:
    record: dict[str, Any] = {
        "name": "small",
        "search": {"recipes": ["gqa"], "kv_ratios": [0.5]},
        "rungs": {"steps": [0, 4]},
        "train": {"dtype": "bf16", "zero_stage": 2},
    }
    config = parse_config(record | {"model": {"path": "x", "dtype": "bf16"}})
    assert (config.model.dtype, config.train.dtype) == ("bfloat16", "bfloat16")
    assert parse_config(record | {"model": {"path": "x"}}).model.dtype == "auto"
