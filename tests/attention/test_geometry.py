"""HeadGeometry of every family, and the contract that each family file must meet."""

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from attention.families import families, family_of, geometry_of
from attention.geometry import RotaryLayout
from attention.plan import LayerPlan


def test_worked_examples() -> None:
    llama = geometry_of(LlamaConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2))
    assert (llama.head_dim, llama.kv_map, llama.kv_ratio) == (8, (0, 0, 0, 0, 1, 1, 1, 1), 0.25)
    assert not (llama.query_bias or llama.output_bias or llama.qk_norm)
    assert geometry_of(LlamaConfig(attention_bias=True)).output_bias
    qwen2 = geometry_of(Qwen2Config())
    assert qwen2.query_bias and qwen2.key_bias and qwen2.value_bias and not qwen2.output_bias
    assert geometry_of(Qwen3Config()).qk_norm
    assert geometry_of(MistralConfig(head_dim=96)).head_dim == 96


def test_rotary_layouts() -> None:
    half = RotaryLayout(8, 4)
    assert (half.first, half.second, half.free) == ((0, 1), (2, 3), (4, 5, 6, 7))
    interleaved = RotaryLayout(4, 4, "interleaved")
    assert (interleaved.first, interleaved.second, interleaved.free) == ((0, 2), (1, 3), ())
    assert RotaryLayout.none(4).free == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="got 6"):
        RotaryLayout(4, 6)
    with pytest.raises(ValueError, match="rotary style"):
        RotaryLayout(4, 4, "spiral")


def test_an_unsupported_model_is_refused_with_the_supported_ones() -> None:
    config = GPT2Config()
    config.model_type = "mamba"
    with pytest.raises(ValueError, match=r"'llama', .*'mistral', .*got 'mamba'"):
        geometry_of(config)


def test_kv_heads_must_divide_query_heads() -> None:
    with pytest.raises(ValueError, match="got 3 and 8"):
        geometry_of(LlamaConfig(num_attention_heads=8, num_key_value_heads=3, hidden_size=64))


@pytest.mark.parametrize("name", sorted(families()))
def test_family_reads_reshapes_and_writes(name: str, tiny_model) -> None:
    model, family = tiny_model(name), families()[name]
    geometry = geometry_of(model.config)
    assert geometry.family == name and family_of(model.config) is family
    modules = family.attention_modules(model)
    assert len(modules) == geometry.num_layers
    heads = family.read(modules[0], geometry)
    H, d, D = geometry.num_heads, geometry.head_dim, geometry.hidden_size
    assert heads.q.shape == (H, d, D) and heads.o.shape == (H, D, d) and heads.k.shape == heads.v.shape == (H, d, D)
    for bias, expected in (
        (heads.q_bias, geometry.query_bias),
        (heads.k_bias, geometry.key_bias),
        (heads.v_bias, geometry.value_bias),
        (heads.o_bias, geometry.output_bias),
    ):
        assert (bias is not None) == expected
    x = torch.randint(geometry.vocab_size, (1, 12), generator=torch.Generator().manual_seed(0))
    stored = heads.to(torch.float64).to(torch.float32)  # a copy: read gives views of the weights
    with torch.no_grad():
        before = model(x).logits
        family.write(modules[0], stored.permute(list(range(H))[::-1]))  # the keys do not change: the logits must,
        assert (model(x).logits - before).abs().max() > 1e-3
        family.write(modules[0], stored)  # and be restored exactly
        assert torch.equal(model(x).logits, before)
    family.reshape(modules[0], geometry, LayerPlan((0, 0, 1, 1), (0,) * 4))
    small = family.read(modules[0], geometry)
    assert small.k.shape[0] == 2 and small.v.shape[0] == 1 and small.q.shape[0] == H
