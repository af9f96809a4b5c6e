"""Counts that do not divide the KV heads, converted and exported: 9 query heads over 3 KV heads, 24 over 8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from verbs import convert_checkpoint, convert_layerwise

from attention.io import checkpoint
from attention.io.export import export
from attention.modeling.model_classes import plan_of

SMALL: dict[str, Any] = {"calibration_tokens": 512, "eval_tokens": 256, "sequence_length": 32, "device": "cpu"}
QUICK = {"refinement.fit_steps": 2, "allocation.tokens": 64, "allocation.fit_steps": 0, "allocation.finalists": 1}
Tiny = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Tiny, demo_tokenizer: PreTrainedTokenizerBase
) -> dict[str, Path]:
    """Llamas of three layers, by query heads over KV heads."""
    folders = {}
    for heads, stored in ((9, 3), (24, 8)):
        folder = folders[f"{heads}/{stored}"] = tmp_path_factory.mktemp("models") / f"of-{heads}"
        sizes = {"num_attention_heads": heads, "num_key_value_heads": stored, "hidden_size": 8 * heads}
        tiny_model("llama", **sizes, num_hidden_layers=3, vocab_size=2048).save_pretrained(folder)
        demo_tokenizer.save_pretrained(folder)
    return folders


def settings(name: str, text: str) -> dict[str, Any]:
    knobs = {} if name in ("gqa", "least_squares") else {k: v for k, v in QUICK.items() if name != "headfold_gqa"}
    knobs |= {"refinement.fit_steps": 2} if name == "headfold_gqa" else {}
    return {**SMALL, "calibration_data": text, "eval_data": text, "recipe_settings": knobs}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("model", "name", "ratio", "heads", "query_heads"),
    [
        ("9/3", "gqa", 0.7, 2, 12),  # groups of two and one: six query heads to each
        ("9/3", "headfold_gqa", 2 / 3, 2, 12),
        ("24/8", "gqa", 3 / 8, 3, 27),
        ("24/8", "least_squares", 0.4, 3, 27),
        ("24/8", "least_squares", 0.3, 2, 24),
    ],
)
def test_one_count_that_does_not_divide(
    model: str, name: str, ratio: float, heads: int, query_heads: int, models: Any, tmp_path: Path, little_text: str
) -> None:
    record = convert_checkpoint(models[model], name, ratio, tmp_path / "out", **settings(name, little_text))
    own_heads = int(model.split("/")[0])
    plan = plan_of(checkpoint.load(tmp_path / "out", torch.float32))
    assert {layer.key_heads for layer in plan.layers} == {heads} and plan.kv_heads == 2 * 3 * heads
    assert record["kv_bytes_per_token"] == 2 * 3 * heads * 8 * 4
    extra = query_heads / own_heads - 1
    assert record["format"] == ("headfold" if extra else "stock")
    for target in ("gqa", "vllm", "gguf"):
        exported = export(tmp_path / "out", target, tmp_path / target, models[model])
        assert exported.exact and exported.kv_heads == (heads,) * 3
        assert exported.kv_bytes_per_token_after == exported.kv_bytes_per_token_before == record["kv_bytes_per_token"]
        assert exported.max_logit_difference <= 1e-4 * max(exported.max_logit, 1)
        assert (exported.zero_query_heads, exported.extra_attention) == (
            3 * (query_heads - own_heads),
            pytest.approx(extra),
        )
        assert any("query heads of zeros" in note for note in exported.notes) == bool(extra)
        if extra:
            assert record["padding"][target]["extra_attention"] == pytest.approx(extra)
            assert f"{100 * extra:.3g} % more work in attention" in record["format_note"]


def test_layers_of_one_two_and_three_heads(models: Any, tmp_path: Path, little_text: str) -> None:
    """Half of nine KV heads is four and a half: four are used, which one, two and three heads per layer make."""
    name = "headfold_layers"
    record = convert_checkpoint(models["9/3"], name, 0.5, tmp_path / "out", **settings(name, little_text))
    assert record["kv_ratio"] == 4 / 9 and record["kv_ratio_asked"] == 0.5
    assert record["ceiling"] == "requested 50%, using 44.44%: 4 of 9 KV heads"
    plan = plan_of(checkpoint.load(tmp_path / "out", torch.float32))
    counts = tuple(layer.key_heads for layer in plan.layers)
    assert sorted(counts) == [1, 1, 2]
    for target, query_heads in (("vllm", 12 * 3), ("gguf", 9 + 9 + 12)):
        exported = export(tmp_path / "out", target, tmp_path / target, models["9/3"])
        assert exported.exact and exported.kv_heads == counts
        assert exported.kv_bytes_per_token_after == record["kv_bytes_per_token"] == 2 * 4 * 8 * 4
        assert exported.max_logit_difference <= 1e-4 * max(exported.max_logit, 1)
        assert exported.zero_query_heads == query_heads - 27
        assert record["padding"][target]["zero_query_heads"] == query_heads - 27


@pytest.mark.extended
@pytest.mark.parametrize(("model", "name", "ratio"), [("24/8", "gqa", 0.4), ("9/3", "headfold_layers", 0.5)])
def test_layer_by_layer_makes_the_same_plan(
    model: str, name: str, ratio: float, models: Any, tmp_path: Path, little_text: str
) -> None:
    options = settings(name, little_text)
    whole = convert_checkpoint(models[model], name, ratio, tmp_path / "whole", **options)
    parts = convert_layerwise(models[model], name, ratio, tmp_path / "parts", progress=lambda line: None, **options)
    for key in ("plan", "kv_ratio", "kv_ratio_asked", "ceiling", "format"):
        assert parts[key] == whole[key]
    assert parts["loss"] == pytest.approx(whole["loss"], abs=1e-3)
