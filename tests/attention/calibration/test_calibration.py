"""One calibration pass: its statistics against the stock model's own, its files, and no leftovers."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from head_references import Seen, activations, as_mha, lifted, watch
from torch import Tensor
from transformers import PreTrainedModel

from attention.base import progress
from attention.base.progress import ProgressStage
from attention.calibration import collecting, store
from attention.calibration.calibrate import calibrate, calibration_digest, weights_of
from attention.calibration.moments import LayerStatistics, packed, unpacked
from attention.calibration.sizes import MIXED, Mixed, layer_bytes, most_exact, sum_bytes
from attention.calibration.store import META, Calibration, CalibrationError
from attention.conversion.convert import convert
from attention.families import family_of, geometry_of
from attention.plan import AttentionPlan, LayerPlan

CASES = {
    "llama": {},
    "llama with biases, GQA": {"attention_bias": True, "num_key_value_heads": 2},
    "mistral, sliding window": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {},
    "qwen3, GQA": {"num_key_value_heads": 1},
    "opt": {},
    "opt, norm after": {"do_layer_norm_before": False},
    "gpt_neox": {},
    "gpt2": {},
    "gpt2, scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "gemma, GQA": {"num_key_value_heads": 2},
    "phi": {},
    "phi, query and key norms": {"qk_layernorm": True},
    "gemma2, GQA": {"num_key_value_heads": 2},
    "gemma3_text": {},
    "gemma4_text, GQA": {"num_key_value_heads": 2},
    "gpt_oss": {},
    "glm4_moe, GQA": {"num_key_value_heads": 2},
    "granite": {},
    "minimax_m2, GQA": {"num_key_value_heads": 2},
    "mixtral": {},
    "olmo2, GQA": {"num_key_value_heads": 2},
    "olmoe": {},
    "phi3, GQA": {"num_key_value_heads": 2},
    "qwen3_moe": {},
    "smollm3": {},
    "stablelm": {},
    "stablelm, no norms": {"qk_layernorm": False, "use_qkv_bias": False},
}
Tiny = Callable[..., PreTrainedModel]


def tensors(statistics: LayerStatistics) -> dict[str, Tensor]:
    return {f.name: v for f in fields(statistics) if isinstance(v := getattr(statistics, f.name), Tensor)}


def reference(model: PreTrainedModel, seen: Seen, layer: int) -> dict[str, Tensor]:
    """The moments as sums over tokens, one at a time, from the stock model's inputs and attention weights."""
    heads = lifted(model)[layer]
    module = family_of(model.config).attention_modules(model)[layer]
    H, d, wide = heads.num_heads, heads.head_dim, heads.hidden_size + 1
    count = seen.x.shape[0] * seen.x.shape[1]
    one = torch.ones(1, dtype=torch.float64)
    result = {
        "input_moment": torch.zeros(wide, wide, dtype=torch.float64),
        "mixed_moments": torch.zeros(H, wide, wide, dtype=torch.float64),
        "query_moment": torch.zeros(H, d, d, dtype=torch.float64),
    }
    for x in seen.x.flatten(0, 1):
        extended = torch.cat([x, one])
        result["input_moment"] += torch.outer(extended, extended) / count
    for head in range(H):
        for token, mixed in enumerate(seen.mixed(head)):  # a sink leaves weights that sum to less than 1
            extended = torch.cat([mixed, seen.weights[:, head].sum(-1).flatten()[token][None]])
            result["mixed_moments"][head] += torch.outer(extended, extended) / count
    for head, queries in enumerate(activations(heads.q, heads.q_bias, seen.x)):
        for query in queries:
            if hasattr(module, "q_layernorm"):  # Phi has one for all heads, StableLM one for each, without a shift
                norm = module.q_layernorm.norms[head] if hasattr(module.q_layernorm, "norms") else module.q_layernorm
                shift = 0 if norm.bias is None else norm.bias.double()
                centred = query - query.mean()
                query = norm.weight.double() * centred / (centred.square().mean() + 1e-5).sqrt() + shift
            if geometry_of(model.config).whole_norm:
                continue
            if hasattr(module, "q_norm"):
                weight = module.q_norm.weight.double() + (1 if geometry_of(model.config).family == "gemma3_text" else 0)
                query = weight * query / (query.square().mean() + 1e-6).sqrt()
            result["query_moment"][head] += torch.outer(query, query).detach() / count
    if geometry_of(model.config).whole_norm:
        queries = activations(heads.q, heads.q_bias, seen.x)
        scale = (queries.square().mean((0, 2)) + module.config.rms_norm_eps).sqrt()
        queries = queries / scale[:, None] * module.q_norm.weight.double().view(H, 1, d)
        result["query_moment"] = torch.einsum("hna,hnb->hab", queries, queries).detach() / count
    return result | {"mixed_moments": packed(result["mixed_moments"])}


@pytest.mark.parametrize("case", CASES)
def test_moments_are_those_of_the_stock_model(case: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model(case.split(",")[0].split()[0], **CASES[case])
    result = calibrate(model, tiny_tokens, batch_size=5, sample_tokens=7 * 24 + 3)
    assert result.tokens == tiny_tokens.numel() == result.layers[0].tokens
    for layer, (statistics, seen) in enumerate(zip(result.layers, watch(model, tiny_tokens), strict=True)):
        for name, expected in reference(model, seen, layer).items():
            torch.testing.assert_close(getattr(statistics, name).double(), expected, rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(statistics.inputs.double(), seen.x[:7], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("held", [3 * 24 * 24, 24 * 5])
def test_attention_weights_are_in_memory_a_slice_at_a_time(
    held: int, tiny_model: Tiny, tiny_tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sequences of a head, or five tokens of one sequence: the same statistics and the same layers above."""
    model = tiny_model("mistral", sliding_window=5, num_key_value_heads=2)
    whole = calibrate(model, tiny_tokens)
    monkeypatch.setattr(collecting, "SLICE_BYTES", 4 * held)
    seen: list[int] = []
    softmax = Tensor.softmax
    monkeypatch.setattr(Tensor, "softmax", lambda x, *a, **k: seen.append(x.numel()) or softmax(x, *a, **k))
    sliced = calibrate(model, tiny_tokens)
    assert 0.8 * held < max(seen) <= held, "what comes after the last of the tokens is left out"
    for one, other in zip(whole.layers, sliced.layers, strict=True):
        for name, value in tensors(one).items():
            torch.testing.assert_close(value, getattr(other, name), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama"])
def test_what_attention_cannot_see_may_be_left_out(
    family: str, tiny_model: Tiny, tiny_tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokens of a long sequence are processed at a time, with all tokens before their end."""
    model = tiny_model(family)
    whole = calibrate(model, tiny_tokens)
    monkeypatch.setattr(collecting, "BLOCK", 5)
    for result, expected in zip(calibrate(model, tiny_tokens).layers, whole.layers, strict=True):
        torch.testing.assert_close(result.mixed_moments, expected.mixed_moments, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(result.input_moment, expected.input_moment, atol=1e-6, rtol=1e-5)


def test_a_symmetric_matrix_comes_back_from_its_triangle() -> None:
    square = torch.randn(3, 7, 7, generator=torch.Generator().manual_seed(0))
    square = square + square.transpose(1, 2)
    assert packed(square).shape == (3, 28)
    assert all(torch.equal(unpacked(one), other) for one, other in zip(packed(square), square, strict=True))


def test_grams_of_heads_follow_from_the_moments(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("qwen2")
    statistics = calibrate(model, tiny_tokens).layers[1]
    heads, seen = lifted(model)[1], watch(model, tiny_tokens)[1]
    keys, values = activations(heads.k, heads.k_bias, seen.x), activations(heads.v, heads.v_bias, seen.x)
    count = keys.shape[1]
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(statistics.key_gram(heads), torch.einsum("ina,jnb->ijab", keys, keys) / count, **close)
    torch.testing.assert_close(
        statistics.value_gram(heads), torch.einsum("ina,jnb->ijab", values, values) / count, **close
    )
    torch.testing.assert_close(statistics.key_mean(heads), keys.mean(1), **close)
    torch.testing.assert_close(statistics.query_gram(heads), statistics.query_moment, **close)
    for head in range(4):
        mixed = activations(heads.v, heads.v_bias, seen.mixed(head))
        flat = mixed.transpose(1, 2).flatten(0, 1)
        gram = statistics.mixed_value_gram(heads, range(4), [head])[0]
        torch.testing.assert_close(gram, flat @ flat.T / count, **close)
        torch.testing.assert_close(statistics.mixed_value_mean(heads)[head], mixed.mean(1), **close)


def test_a_converted_model_is_seen_as_its_expanded_form(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("llama")
    plan = AttentionPlan((LayerPlan((0, 1, 0, 1), (0, 1, 2, 0)), LayerPlan((0, 0, 0, 1), (0, 0, 1, 1))), 8)
    converted = convert(model, plan)
    result = calibrate(converted, tiny_tokens)
    assert converted.config._attn_implementation == "headfold"
    family = family_of(model.config)
    expanded = copy.deepcopy(model)
    geometry = geometry_of(model.config)
    for target, source, layer in zip(
        family.attention_modules(expanded), family.attention_modules(converted), plan.layers, strict=True
    ):
        family.write(target, family.read(source, geometry).expand(layer.key_map, layer.value_map))
    for got, expected in zip(result.layers, calibrate(expanded, tiny_tokens).layers, strict=True):
        for name, value in tensors(got).items():
            torch.testing.assert_close(value, getattr(expected, name), rtol=1e-4, atol=1e-5, msg=name)


def test_lower_precision_models_are_summed_in_float32(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("llama")
    exact = calibrate(model, tiny_tokens).layers[0]
    rough = calibrate(copy.deepcopy(model).to(torch.bfloat16), tiny_tokens).layers[0]
    assert rough.input_moment.dtype == torch.float64 and rough.mixed_moments.dtype == torch.float32
    scale = exact.mixed_moments.abs().max()
    assert (rough.mixed_moments - exact.mixed_moments).abs().max() < 0.02 * scale


def test_the_model_is_left_as_it_was(tiny_model: Tiny, tiny_tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calibrate(model, tiny_tokens)

    def stop(stage: ProgressStage, count: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ProgressStage, "step", stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, tiny_tokens, batch_size=4)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("mixed", MIXED)
def test_the_size_is_the_one_that_is_estimated(mixed: Mixed, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("llama", num_key_value_heads=2)
    geometry = geometry_of(model.config)
    result = calibrate(model, tiny_tokens, sample_tokens=96, mixed=mixed)
    stored_bytes = sum(t.untyped_storage().nbytes() for layer in result.layers for t in tensors(layer).values())
    assert stored_bytes == geometry.num_layers * layer_bytes(geometry, 96, mixed)


def test_in_memory_the_sums_count_in_the_choice_of_the_form(tiny_model: Tiny) -> None:
    """They are whole matrices of all layers at once, where stored moments are halves."""
    geometry = geometry_of(tiny_model("llama", num_key_value_heads=2).config)
    exact = geometry.num_layers * layer_bytes(geometry, 96)
    sums = geometry.num_layers * sum_bytes(geometry, "float32")
    assert most_exact(geometry, 96, exact) == "float32"
    assert most_exact(geometry, 96, exact, in_memory=True) == "pooled"
    assert most_exact(geometry, 96, exact + sums, in_memory=True) == "float32"


def test_progress_counts_sequences(
    tiny_model: Tiny, tiny_tokens: Tensor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SAY_SECONDS", 0)
    calibrate(tiny_model("llama"), tiny_tokens, batch_size=5)
    assert not capsys.readouterr().err, "a library is silent unless it is asked"
    with progress.show_progress("convert"):
        calibrate(tiny_model("llama"), tiny_tokens, batch_size=5)
    output = [line for line in capsys.readouterr().err.splitlines() if line.startswith("calibrating: ")]
    assert [line.split(",")[0] for line in output] == [f"calibrating: {n} of 12 sequences" for n in (5, 10, 12)]


# ---- files --------------------------------------------------------------------------------------------------------


def test_files_bring_back_every_bit(tiny_model: Tiny, tiny_tokens: Tensor, tmp_path: Path) -> None:
    calibration = calibrate(tiny_model("qwen3"), tiny_tokens)
    calibration.save(tmp_path / "deep" / "c")
    calibration.save(tmp_path / "deep" / "c")  # over an older one
    result = Calibration.load(tmp_path / "deep" / "c")
    assert (result.tokens, result.digest) == (calibration.tokens, calibration.digest)
    for one, other in zip(calibration.layers, result.layers, strict=True):
        assert one.tokens == other.tokens
        assert all(torch.equal(value, getattr(other, name)) for name, value in tensors(one).items())
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["c"]


def test_a_failed_save_leaves_the_old_files(
    tiny_model: Tiny, tiny_tokens: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = calibrate(tiny_model("llama"), tiny_tokens[:4])
    old.save(tmp_path / "c")
    new = calibrate(tiny_model("llama"), tiny_tokens)

    def fail(result: dict[str, Tensor], path: Path) -> None:
        path.write_bytes(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(store, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        new.save(tmp_path / "c")
    assert Calibration.load(tmp_path / "c").digest == old.digest
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_what_a_killed_save_has_left_goes_after_a_day(tiny_model: Tiny, tiny_tokens: Tensor, tmp_path: Path) -> None:
    abandoned, living = (tmp_path / f".c.{pid}.new" for pid in (1, 2))
    for remaining in (abandoned, living):
        remaining.mkdir()
        (remaining / "layer-0000.safetensors").write_bytes(b"half a file")
    yesterday = time.time() - 25 * 3600
    for path in (abandoned / "layer-0000.safetensors", abandoned):
        os.utime(path, (yesterday, yesterday))
    calibrate(tiny_model("llama"), tiny_tokens).save(tmp_path / "c")
    assert {path.name for path in tmp_path.iterdir()} == {"c", living.name}


@pytest.mark.parametrize("damage", ["flip", "cut", "meta", "format", "gone"])
def test_damaged_files_are_refused_by_name(damage: str, tiny_model: Tiny, tiny_tokens: Tensor, tmp_path: Path) -> None:
    calibrate(tiny_model("llama"), tiny_tokens).save(tmp_path / "c")
    weights, meta = tmp_path / "c" / "layer-0001.safetensors", tmp_path / "c" / META
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
        weights.write_bytes(content)
    elif damage == "cut":
        weights.write_bytes(content[:-100])
    elif damage == "meta":
        meta.write_text("{")
    elif damage == "format":
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format": 99}))
    else:
        weights.unlink()
    with pytest.raises(CalibrationError, match="calibrate again") as error:
        Calibration.load(tmp_path / "c")
    assert str(tmp_path / "c") in str(error.value)


def test_the_digest_names_weights_tokens_and_settings(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("llama")
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    windowed = tiny_model("mistral", sliding_window=4), tiny_model("mistral")

    def digest(
        model: PreTrainedModel, tokens: Tensor = tiny_tokens, sample: int = 100, mixed: Mixed = "float32"
    ) -> str:
        return calibration_digest(model.config, weights_of(model), tokens, sample, model.dtype, mixed)

    digests = [
        digest(model),
        digest(other),
        digest(model, tiny_tokens.flip(0)),
        digest(model, tiny_tokens.view(6, 48)),
        digest(model, sample=200),
        digest(copy.deepcopy(model).to(torch.bfloat16)),
        *(digest(m) for m in windowed),
        *(digest(model, mixed=mixed) for mixed in MIXED[1:]),
    ]
    assert len(set(digests)) == len(digests)
    assert digests[0] == digest(tiny_model("llama"), tiny_tokens.int())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[0], r"non-empty \[N, T\]"),
        (lambda t: t.float(), "float32"),
        (lambda t: t[:0], "non-empty"),
        (lambda t: t.view(3, 96), "96 tokens are longer than the model's 64"),
        (lambda t: t + 1, r"\[0, 63\], got .* to 64"),
        (lambda t: t - 1, "got -1 to"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(
    change: Callable[[Tensor], Tensor], message: str, tiny_model: Tiny, tiny_tokens: Tensor
) -> None:
    tokens = tiny_tokens.clone()
    tokens[0, 0], tokens[0, 1] = 0, 63
    with pytest.raises(ValueError, match=message):
        calibrate(tiny_model("llama"), change(tokens))


def test_settings_that_do_not_fit_are_refused(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="sample_tokens must be 0 or hold a sequence of 24 tokens, got 23"):
        calibrate(model, tiny_tokens, sample_tokens=23)
    assert calibrate(model, tiny_tokens, sample_tokens=0).layers[0].inputs.numel() == 0


def test_a_gqa_checkpoint_and_its_lift_calibrate_alike(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("qwen2", num_key_value_heads=2)
    for got, expected in zip(
        calibrate(model, tiny_tokens).layers,
        calibrate(as_mha(model), tiny_tokens).layers,
        strict=True,
    ):
        torch.testing.assert_close(got.mixed_moments, expected.mixed_moments, rtol=1e-4, atol=1e-5)


def test_a_composed_model_is_refused(tiny_model) -> None:
    """Its attention weights are mixed across heads and do not sum to one; the moments would be wrong in silence."""
    from attention.conversion.convert import convert
    from attention.plan import AttentionPlan, Composition, LayerPlan

    plan = AttentionPlan((LayerPlan.identity(4),) * 2, 8, composition=Composition())
    with pytest.raises(ValueError, match="composed model .* cannot be calibrated"):
        calibrate(convert(tiny_model("llama"), plan), torch.zeros(2, 8, dtype=torch.long))
