"""Properties of single families: layouts of fused weights, variants of a config, refusals, and GPT-NeoX as Phi."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from head_references import logits, with_heads
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CohereConfig,
    Gemma2Config,
    Gemma3Config,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    OlmoeConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedModel,
    Qwen2VLConfig,
    SmolLM3Config,
)

from attention.conversion.convert import convert, lift, read_layers
from attention.families import families, family_of, geometry_of
from attention.io import checkpoint, export
from attention.modeling.growing_cache import cache_argument
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan, LayerPlan

Tiny = Callable[..., PreTrainedModel]
UNIFORM = AttentionPlan((LayerPlan((0, 1, 1, 0), (0, 1, 1, 0)),) * 2, 8)
DECOUPLED = AttentionPlan((LayerPlan((0, 1, 0, 2), (0, 0, 0, 0)), LayerPlan((0, 0, 0, 1), (0, 1, 2, 3))), 8)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt, norm after": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),  # as opt-350m
    "opt, no biases": ("opt", {"enable_bias": False}),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, unscaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt_neox, serial": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox, no biases": ("gpt_neox", {"attention_bias": False}),
    "gpt_neox, full rotary": ("gpt_neox", {"rotary_pct": 1.0}),
    "gpt_neox, no rotary": ("gpt_neox", {"rotary_pct": 0.0}),
    "gemma, biases": ("gemma", {"attention_bias": True}),
    "phi, query and key norms": ("phi", {"qk_layernorm": True}),
    "gpt_oss, no biases": ("gpt_oss", {"attention_bias": False}),
    "olmo2, biases": ("olmo2", {"attention_bias": True}),
    "qwen2, some layers slide": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "smollm3, windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 10, "no_rope_layer_interval": 2}),
    "stablelm, parallel, no norms": ("stablelm", {"qk_layernorm": False, "use_parallel_residual": True}),
}


def test_geometry_of_published_configs() -> None:
    """Numbers from the models' papers and cards."""
    opt = geometry_of(OPTConfig())
    assert (opt.num_heads, opt.head_dim, opt.rotary.dims, opt.max_positions, opt.vocab_size) == (12, 64, 0, 2048, 50272)
    assert opt.query_bias and opt.key_bias and opt.value_bias and opt.output_bias
    pythia = geometry_of(GPTNeoXConfig(hidden_size=512, num_hidden_layers=6, num_attention_heads=8))
    assert (pythia.head_dim, pythia.rotary.dims, pythia.rotary.style, pythia.kv_ratio) == (64, 16, "half", 1)
    assert not geometry_of(GPTNeoXConfig(attention_bias=False)).value_bias
    gpt2 = geometry_of(GPT2Config())
    assert (gpt2.num_layers, gpt2.num_heads, gpt2.head_dim, gpt2.rotary.dims, gpt2.max_positions) == (
        12,
        12,
        64,
        0,
        1024,
    )
    gemma = geometry_of(GemmaConfig(num_key_value_heads=1))
    assert (gemma.hidden_size, gemma.num_heads, gemma.head_dim, gemma.num_kv_heads) == (3072, 16, 256, 1)
    smollm = geometry_of(SmolLM3Config())
    assert (smollm.layer(2).rotary.dims, smollm.layer(3).rotary.dims) == (128, 0)
    oss = geometry_of(GptOssConfig())
    assert (oss.num_heads, oss.num_kv_heads, oss.head_dim, oss.hidden_size, oss.output_bias) == (64, 8, 64, 2880, True)
    phi = geometry_of(PhiConfig())
    assert (phi.head_dim, phi.rotary.dims, phi.output_bias, phi.qk_norm) == (64, 32, True, False)
    assert geometry_of(PhiConfig(qk_layernorm=True)).qk_norm


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(add_cross_attention=True), "add_cross_attention=true is not supported"),
        (GemmaConfig(use_bidirectional_attention=True), "use_bidirectional_attention=true is not supported"),
        (
            Gemma2Config(use_bidirectional_attention=True),
            "Gemma 2 with use_bidirectional_attention=true is not",
        ),
        (OlmoeConfig(clip_qkv=8.0), "olmoe with clip_qkv=8.0 is not supported"),
        (CohereConfig(), "model type must be one of .*'gemma'.*got 'cohere'"),
        (Gemma3Config(), "a gemma3 is multimodal, and its language model, a gemma3_text, is what can be converted"),
        (
            Qwen2VLConfig(),
            "a qwen2_vl is multimodal, .*, a qwen2_vl_text, is of no supported type; .* are gemma",
        ),
    ],
)
def test_what_a_plan_does_not_describe_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        geometry_of(config)


def test_the_language_model_of_a_multimodal_checkpoint_is_taken_out_as_the_refusal_says(
    tiny_model: Tiny, tiny_tokens: Tensor, tmp_path: Path
) -> None:
    text = tiny_model("gemma3_text", tie_word_embeddings=True, final_logit_softcapping=None).config.to_dict()
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    AutoModelForImageTextToText.from_config(config).eval().save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="Save it alone") as refused:
        checkpoint.load(tmp_path / "whole")
    lines = str(refused.value).partition("in transformers: ")[2].partition("; and copy")[0]
    names = {"SOURCE": tmp_path / "whole", "NEW_FOLDER": tmp_path / "text"}
    exec(lines, {**names, **{name: getattr(transformers, name) for name in re.findall(r"\b[AG]\w+3?\w*For\w+", lines)}})
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole")
    chosen = checkpoint.load(tmp_path / "text")
    assert geometry_of(chosen.config).family == "gemma3_text"
    torch.testing.assert_close(logits(chosen, tiny_tokens), logits(whole, tiny_tokens), rtol=0, atol=1e-5)


def test_llama_3_keeps_its_rotary_scaling(tiny_model: Tiny, tiny_tokens: Tensor, tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 16
    model = tiny_model("llama", rope_parameters=rope, num_key_value_heads=2, tie_word_embeddings=True)
    plain = tiny_model("llama", num_key_value_heads=2, tie_word_embeddings=True)
    assert (logits(model, tiny_tokens) - logits(plain, tiny_tokens)).abs().max() > 0.01
    lifted = convert(model, AttentionPlan.identity(2, 4, 8))
    torch.testing.assert_close(logits(lifted, tiny_tokens), logits(model, tiny_tokens), rtol=0, atol=1e-5)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint.save(convert(lifted, UNIFORM), tmp_path / "model"))
    assert stock.config.rope_parameters == model.config.rope_parameters
    again = convert(lifted, AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 0, 1, 1)),) * 2, 8))
    back = AutoModelForCausalLM.from_pretrained(checkpoint.save(again, tmp_path / "back"))
    torch.testing.assert_close(logits(back, tiny_tokens), logits(model, tiny_tokens), rtol=0, atol=1e-5)


@torch.no_grad()
def test_fused_weights_are_split_as_the_model_splits_them(tiny_model: Tiny) -> None:
    """Heads read from the weights give the queries, keys and values that the stock projections give."""
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    neox, gpt2 = tiny_model("gpt_neox"), tiny_model("gpt2")
    fused = neox.gpt_neox.layers[1].attention.query_key_value(x).view(5, 4, 3, 8)
    thirds = gpt2.transformer.h[1].attn.c_attn(x).view(5, 3, 4, 8).transpose(1, 2)
    for model, expected in ((neox, fused), (gpt2, thirds)):
        heads = read_layers(model)[1]
        for i, (rows, bias) in enumerate(((heads.q, heads.q_bias), (heads.k, heads.k_bias), (heads.v, heads.v_bias))):
            assert bias is not None
            assert torch.allclose(torch.einsum("hdD,nD->nhd", rows, x) + bias, expected[:, :, i], atol=1e-5)


@pytest.mark.parametrize("case", VARIANTS)
@torch.no_grad()
def test_variants_of_a_config(case: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    """Grouped equals expanded, and a cache changes nothing."""
    name, overrides = VARIANTS[case]
    model = tiny_model(name, **overrides)
    grouped = convert(model, DECOUPLED)
    x = tiny_tokens[:2]
    whole = logits(grouped, x)
    expanded = with_heads(model, lift(grouped))
    torch.testing.assert_close(whole, logits(expanded, x), rtol=0, atol=2e-5)
    cache = grouped(x[:, :20], use_cache=True).past_key_values
    steps = [grouped(x[:, t : t + 1], **cache_argument(grouped, cache), use_cache=True).logits for t in range(20, 24)]
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 20:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", sorted(families()))
def test_what_the_output_projection_adds_to_the_stream(name: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    """A vector that is added to the attention's output is in the layer's output, times the scale, if no MLP changes it.
    Where a norm follows it is not."""
    model = tiny_model(name, **({"residual_multiplier": 0.25} if name == "granite" else {}))
    family = family_of(model.config)
    attention = family.attention_modules(model)[0]
    path = next(path for path, module in model.named_modules() if module is attention)
    layer = model.get_submodule(path.rpartition(".")[0])
    inside = {id(parameter) for parameter in attention.parameters()}
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1 and id(parameter) not in inside:
                parameter.zero_()
    added = torch.randn(geometry_of(model.config).hidden_size, generator=torch.Generator().manual_seed(0))
    outputs: list[Tensor] = []
    layer.register_forward_hook(lambda *call: outputs.append(call[-1] if torch.is_tensor(call[-1]) else call[-1][0]))
    for scale in (0.0, 1.0):
        hook = attention.register_forward_hook(lambda *call, s=scale: (call[-1][0] + s * added, *call[-1][1:]))
        logits(model, tiny_tokens[:2])
        hook.remove()
    change = outputs[1] - outputs[0]
    expected = family.residual_scale(model.config)
    if expected is None:
        share = (change @ added) / (added @ added)
        assert (change - share[..., None] * added).abs().max() > 0.01
    else:
        torch.testing.assert_close(change, expected * added.expand_as(change), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama"])
@torch.no_grad()
def test_a_static_cache_is_causal_without_padding(name: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    """The prompt fills the first places of the cache alone. Capped scores and sinks are computed here."""
    model = convert(tiny_model(name), DECOUPLED)
    prompt = tiny_tokens[:2, :12]
    common: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    common |= {"output_logits": True, "return_dict_in_generate": True}
    grown: Any = model.generate(prompt, **common)
    static: Any = model.generate(prompt, **common, cache_implementation="static", disable_compile=True)
    torch.testing.assert_close(torch.stack(static.logits), torch.stack(grown.logits), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", sorted(families()))
def test_gradient_checkpointing_gives_the_same_gradients(name: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = convert(tiny_model(name), DECOUPLED)
    result = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model.train().zero_grad()
        model(tiny_tokens[:2], labels=tiny_tokens[:2]).loss.backward()
        result.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert result[0].keys() == result[1].keys() and len(result[0]) == len(list(model.parameters()))
    for key, gradient in result[0].items():
        torch.testing.assert_close(result[1][key], gradient, msg=key)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "opt"])
def test_eager_attention_is_refused_where_it_would_ignore_the_maps(name: str, tiny_model: Tiny) -> None:
    model = convert(tiny_model(name), DECOUPLED)
    model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="head maps need attn_implementation='headfold'"):
        model(torch.arange(4)[None])


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention", "flash_attention_2"])
def test_no_other_attention_can_be_set(implementation: str, tiny_model: Tiny) -> None:
    model = convert(tiny_model("llama"), DECOUPLED)
    with pytest.raises(ValueError, match=f"expected 'headfold', which reads the head maps .* '{implementation}'"):
        model.set_attn_implementation(implementation)
    model.set_attn_implementation("headfold")


# ---- GPT-NeoX as Phi ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [{}, {"attention_bias": False, "rotary_pct": 1.0}], ids=["biases", "no biases"])
@pytest.mark.parametrize("plan", [None, UNIFORM, DECOUPLED], ids=["stock", "uniform", "decoupled"])
def test_gpt_neox_is_lowered_to_phi(
    plan: AttentionPlan | None, overrides: dict[str, Any], tiny_model: Tiny, tiny_tokens: Tensor, tmp_path: Path
) -> None:
    model = tiny_model("gpt_neox", **overrides)
    model = model if plan is None else convert(model, plan)
    source = checkpoint.save(model, tmp_path / "source")
    report = export.export(source, "phi", tmp_path / "phi", allow_larger_cache=True)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "phi")
    assert type(stock).__name__ == "PhiForCausalLM" and report.exact and report.model_type == "phi"
    torch.testing.assert_close(logits(stock, tiny_tokens), logits(model, tiny_tokens), rtol=0, atol=2e-5)
    assert report.kv_bytes_per_token_before == plan_of(model).kv_bytes_per_token("float32")
    if plan is UNIFORM:
        assert report.kv_bytes_per_token_after == report.kv_bytes_per_token_before
        assert stock.config.num_key_value_heads == 2


def test_phi_in_lower_precision_differs_by_rounding_alone(tiny_model: Tiny, tmp_path: Path) -> None:
    model = convert(tiny_model("gpt_neox", dtype=torch.bfloat16), UNIFORM)
    report = export.export(checkpoint.save(model, tmp_path / "source"), "phi", tmp_path / "phi")
    assert report.dtype == "bfloat16" and 0 < report.max_logit_difference < 0.05 * report.max_logit


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("llama", {}, "takes a gpt_neox checkpoint, got llama"),
        ("gpt_neox", {"use_parallel_residual": False}, "use_parallel_residual=true"),
    ],
)
def test_phi_refuses_what_it_cannot_hold(
    name: str, overrides: dict[str, Any], message: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    source = checkpoint.save(convert(tiny_model(name, **overrides), DECOUPLED), tmp_path / "source")
    with pytest.raises(ValueError, match=message):
        export.export(source, "phi", tmp_path / "phi")
    assert not (tmp_path / "phi").exists()


def test_every_family_is_found_by_its_model_type() -> None:
    first = {"gemma", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "qwen2", "qwen3"}
    later = {
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "glm4_moe",
        "gpt_oss",
        "granite",
        "minimax_m2",
        "mixtral",
        "olmo2",
        "olmoe",
    }
    assert first | later | {"gemma4_text", "phi3", "qwen3_moe", "smollm3", "stablelm"} <= set(families())
    assert all(family_of(family.config_class()) is family for family in families().values())
