"""The tolerance of logits: an exact copy of a deep model passes, a slightly wrong one does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

from attention.io.export import largest_difference, probe
from attention.io.rounding_noise import logit_tolerance

HEADS, DIM = 4, 16


def deep_model(layers: int) -> PreTrainedModel:
    """A random Llama whose attention matters and whose logits are as large as a trained model's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HEADS * DIM,
        intermediate_size=2 * HEADS * DIM,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=256,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=(HEADS * DIM) ** -0.5,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.lm_head.weight *= 10
    return model


def tolerance_of(model: Any, seed: int = 0) -> float:
    with torch.no_grad():
        expected = [probe(model)]
    return logit_tolerance(lambda: [probe(model)], expected, torch.Generator().manual_seed(seed))[0]


def permuted(model: Any, layer: Any, order: list[int], names: tuple[str, ...]) -> None:
    rows = (torch.tensor(order)[:, None] * DIM + torch.arange(DIM)).flatten()
    for name in names:
        weight = getattr(layer.self_attn, name).weight
        weight.copy_(weight[:, rows] if name == "o_proj" else weight[rows])


def heads_in_another_order(model: Any) -> None:
    for layer in model.model.layers:
        permuted(model, layer, [2, 0, 3, 1], ("q_proj", "k_proj", "v_proj", "o_proj"))


def one_value_head_exchanged(model: Any) -> None:
    permuted(model, model.model.layers[-1], [1, 0, 2, 3], ("v_proj",))


def one_key_head_a_position_late(model: Any) -> None:
    angles = model.model.rotary_emb.inv_freq
    weight = model.model.layers[-1].self_attn.k_proj.weight
    first, second = weight[: DIM // 2].clone(), weight[DIM // 2 : DIM].clone()
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    weight[: DIM // 2] = first * cos - second * sin
    weight[DIM // 2 : DIM] = second * cos + first * sin


@pytest.mark.parametrize("layers", [2, 32, 80])
@torch.no_grad()
def test_an_equal_model_is_within_the_tolerance_and_a_wrong_one_is_not(layers: int) -> None:
    model = deep_model(layers)
    tolerance = tolerance_of(model)

    def difference(change: Callable[[Any], None]) -> float:
        other = copy.deepcopy(model)
        change(other)
        return largest_difference(probe(model), probe(other))

    assert 0 < difference(heads_in_another_order) < tolerance
    assert difference(one_value_head_exchanged) > 5 * tolerance
    assert difference(one_key_head_a_position_late) > 5 * tolerance


def test_the_tolerance_grows_with_depth_and_follows_from_the_seed() -> None:
    shallow, deep = deep_model(2), deep_model(80)
    assert tolerance_of(deep) > 2 * tolerance_of(shallow)
    assert tolerance_of(deep, seed=1) == tolerance_of(deep, seed=1) != tolerance_of(deep, seed=2)


def test_the_projections_of_gpt2_are_reordered_too() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [probe(model)]
    tolerance, noise = logit_tolerance(lambda: [probe(model)], expected, torch.Generator().manual_seed(0))
    assert 0 < noise < tolerance < 1e-3
