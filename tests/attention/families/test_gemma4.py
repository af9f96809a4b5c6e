"""Gemma 4: the layers with a window are converted, the others stay what they are, in models, files and bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_references import logits
from transformers import AutoModelForCausalLM, Gemma4Config, PreTrainedModel

from attention.cache_formats import CachePair
from attention.calibration.calibrate import calibrate
from attention.conversion.convert import convert
from attention.families import families, geometry_of
from attention.io import checkpoint
from attention.io.export import export
from attention.io.layers.windows import check_windows
from attention.io.targets import target
from attention.modeling.grouped import cache_bytes
from attention.modeling.growing_cache import cache_of
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan, LayerPlan, PlanError
from attention.ratios import own_bytes, own_cache, ratio_of_bytes

Tiny = Callable[..., PreTrainedModel]
NAME = "gemma4_text"
HALF = LayerPlan((0, 0, 1, 1), (0, 0, 1, 1))
PLAN = AttentionPlan((HALF, HALF), 8)
OTHERS = ((2, 16), (2, 16))
IDS = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))


def test_the_geometry_is_of_the_layers_with_a_window(tiny_model: Tiny) -> None:
    config = tiny_model(NAME, num_key_value_heads=2).config
    geometry = geometry_of(config)
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim) == (2, 2, 8)
    assert geometry.decoder_layers == (0, 2) and geometry.other_layers == OTHERS
    assert own_bytes(geometry, "bfloat16") == 2 * (2 * 2 * 2 * 8 + 2 * 2 * 2 * 16)
    assert "2 layers that are converted and 2 that are not, 384 KV bytes per token" in own_cache(geometry, "bfloat16")
    assert ratio_of_bytes(320, geometry, "bfloat16") == 0.5 and ratio_of_bytes(200, geometry, "bfloat16") < 0
    assert plan_of(tiny_model(NAME)).other_layers == OTHERS


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention_k_eq_v": False},
        {"global_head_dim": 8, "attention_k_eq_v": False},
        {"hidden_size_per_layer_input": 0},
        {"attention_bias": True},
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
        {"use_bidirectional_attention": "vision"},
    ],
    ids=str,
)
def test_half_of_the_heads(settings: dict[str, Any], tiny_model: Tiny, tmp_path: Path) -> None:
    """In memory, from disk in transformers alone, and through its cache: the same; bytes as the plan says."""
    model = tiny_model(NAME, **settings)
    same = convert(model, plan_of(model))
    assert torch.equal(logits(same, IDS), logits(model, IDS))
    made = convert(model, PLAN, fusion="least_squares", calibration=calibrate(model, IDS))
    others = sum(2 * heads * dim for heads, dim in geometry_of(model.config).other_layers)
    assert plan_of(made).kv_bytes_per_token("float32") == 4 * (2 * 2 * 2 * 8 + others)
    with torch.no_grad():  # as many tokens as the window holds
        assert cache_bytes(cache_of(made(IDS[:1, :9], use_cache=True))) == 9 * 4 * (2 * 2 * 2 * 8 + others)
    folder = checkpoint.save(made, tmp_path / "model")
    stock = AutoModelForCausalLM.from_pretrained(folder)
    assert stock.config.model_type == NAME
    torch.testing.assert_close(logits(stock, IDS), logits(made, IDS), rtol=0, atol=1e-5)
    assert plan_of(checkpoint.load(folder)) == plan_of(made)
    written = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(made.generate(IDS, **written), made.generate(IDS, **written, use_cache=False))


def test_published_files_are_read(tiny_model: Tiny, tmp_path: Path) -> None:
    """They name what layers without a window have, and no layers; what is written names both."""
    model = tiny_model(NAME)
    folder = checkpoint.save(model, tmp_path / "model")
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    assert (fields["global_head_dim"], fields["num_global_key_value_heads"]) == (16, 2)
    assert "rope_scaling" not in fields
    del fields["per_layer_config"]
    file.write_text(json.dumps(fields))
    assert torch.equal(logits(checkpoint.load(folder), IDS), logits(model, IDS))


def test_an_export_is_a_stock_folder(tiny_model: Tiny, tmp_path: Path) -> None:
    source = checkpoint.save(convert(tiny_model(NAME), PLAN), tmp_path / "model", plain=False)
    for name in ("gqa", "per_layer", "vllm"):
        report = export(source, name, tmp_path / name)
        assert report.exact and report.model_type == NAME and report.kv_heads == (2, 2)
        assert report.kv_bytes_per_token_after == report.kv_bytes_per_token_before == 768
        assert not list((tmp_path / name).glob("*.py")), "no code is needed"
    support = target("gqa").support_for(checkpoint.load_config(source), plan_of(checkpoint.load(source)))
    assert support.on_rank(2).bytes_per_token("float32") == 384 and support.on_rank(4).other_layers == (
        (1, 16),
        (1, 16),
    )


def test_formats_of_the_cache_are_of_all_layers(tiny_model: Tiny) -> None:
    plan = plan_of(tiny_model(NAME))
    fp8 = CachePair.parse("fp8")
    assert 2 * fp8.bytes_per_token(plan) == plan.kv_bytes_per_token("float16")
    support = target("gqa").support_for(tiny_model(NAME).config, plan)
    assert support.bytes_in(fp8) == fp8.bytes_per_token(plan)


def test_a_plan_is_read_as_it_was_written() -> None:
    plan = replace(PLAN, other_layers=OTHERS)
    assert AttentionPlan.from_json(plan.to_json()) == plan and "other_layers" not in PLAN.to_dict()
    with pytest.raises(PlanError, match=r"pairs of a number of KV heads and a head dim, got \(2,\)"):
        AttentionPlan.from_dict(PLAN.to_dict() | {"other_layers": [[2]]})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "'all' is not supported; expected causal"),
        ({"num_kv_shared_layers": 2}, "expected num_kv_shared_layers 0, got 2"),
        ({"layer_types": ["full_attention"] * 4}, "one number of KV heads and one head dim, got no such layer"),
        ({"per_layer_config": {0: {"num_key_value_heads": 2}}}, r"head dim, got \[\(2, 8\), \(4, 8\)\]"),
    ],
)
def test_what_is_refused_is_known_from_the_config(settings: dict[str, Any], message: str, tiny_model: Tiny) -> None:
    config = tiny_model(NAME).config.to_dict() | settings
    with pytest.raises(ValueError, match=message):
        geometry_of(families()[NAME].config_class(**config))


def test_what_its_plans_cannot_have(tiny_model: Tiny) -> None:
    model = tiny_model(NAME)
    with pytest.raises(PlanError, match="values of this gemma4_text pass a norm.*width=1"):
        convert(model, AttentionPlan((replace(HALF, value_width=2), HALF), 8))
    with pytest.raises(PlanError, match=r"other_layers, the checkpoint \(gemma4_text\) has"):
        convert(model, replace(PLAN, other_layers=((1, 16),)))
    with pytest.raises(ValueError, match="only some are converted.*convert it in memory"):
        check_windows(model.config)
    with pytest.raises(ValueError, match="a gemma4 is multimodal, and its language model, a gemma4_text, is what can"):
        geometry_of(Gemma4Config())
