"""Slow, obvious references: what the model itself says about its heads, token by token. Imported by the tests here."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.conversion.alignment.rotations import rotation_from_cross
from attention.families import family_of, geometry_of
from attention.geometry import RotaryLayout
from attention.heads import LayerHeads
from attention.plan import LayerPlan


def procrustes(x: Tensor, y: Tensor, layout: RotaryLayout | None = None) -> Tensor:
    """The P `[d, d]` (float64) nearest to turning the tokens x `[d, N]` into y; with a `layout` among
    those that commute with its RoPE (Jin 2024, eq. 4 to 6, and 14 to 17)."""
    return rotation_from_cross(y.double() @ x.double().T, layout or RotaryLayout.none(len(x)))


@dataclass
class Seen:
    """One layer as the stock model runs it: inputs x `[n, T, D]` and attention weights `[n, H, T, T]`, float64."""

    x: Tensor
    weights: Tensor

    def mixed(self, head: int) -> Tensor:
        """`[n T, D]`: what the values of a head see."""
        return torch.cat([self.weights[i, head] @ self.x[i] for i in range(len(self.x))])


@torch.no_grad()
def watch(model: PreTrainedModel, tokens: Tensor) -> list[Seen]:
    """Inputs and attention weights of every layer, from a copy of the stock model with eager attention."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    inputs: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        inputs.append((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).double())

    for module in family_of(model.config).attention_modules(model):
        module.register_forward_pre_hook(keep, with_kwargs=True)
    weights = model(tokens, output_attentions=True, use_cache=False).attentions
    of_layers = [weights[index] for index in geometry_of(model.config).decoder_layers or range(len(weights))]
    return [Seen(x, w.double()) for x, w in zip(inputs, of_layers, strict=True)]


def lifted(model: PreTrainedModel) -> list[LayerHeads]:
    """Heads with one key and one value head a query head."""
    geometry, family = geometry_of(model.config), family_of(model.config)
    layers = [family.read(m, geometry).to(torch.float32) for m in family.attention_modules(model)]
    return [heads.expand(geometry.kv_map, geometry.kv_map) for heads in layers]


def as_mha(model: PreTrainedModel) -> PreTrainedModel:
    """A stock model of the same family with a key and a value head for each query head, and the same weights."""
    if geometry_of(model.config).kv_ratio == 1:
        return copy.deepcopy(model)
    config = copy.deepcopy(model.config)
    config.num_key_value_heads = config.num_attention_heads
    plain = type(model)(config).eval()
    state = {k: v for k, v in model.state_dict().items() if ".k_proj." not in k and ".v_proj." not in k}
    plain.load_state_dict(state, strict=False)
    return with_heads(plain, lifted(model))


def with_heads(
    model: PreTrainedModel, layers: Sequence[LayerHeads], plans: Sequence[LayerPlan] | None = None
) -> PreTrainedModel:
    """The stock multi-head model with these heads. Fused heads are repeated for each reader: no map code runs."""
    plain, family = copy.deepcopy(model), family_of(model.config)
    for index, (module, heads) in enumerate(zip(family.attention_modules(plain), layers, strict=True)):
        if plans is not None:
            heads = heads.expand(plans[index].key_map, plans[index].value_map)
        family.write(module, heads)
    return plain


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(tokens).logits


def activations(rows: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """`[G, n T, d]` float64 of projections `[G, d, D]` for x `[..., D]`."""
    result = torch.einsum("gdD,nD->gnd", rows.double(), x.flatten(0, -2).double())
    return result if bias is None else result + bias.double()[:, None]
