"""GPT-NeoX as Phi, which has grouped key and value heads and is served by stock engines.

Both run attention and MLP in parallel on one residual. GPT-NeoX has a separate layer norm for each,
Phi one for both: the scales and shifts, by which alone they differ, are folded into the projections
that read them. The KV heads are then laid out by the `gqa` target.

Legend: n the normalised input, g and b a norm's scale and shift: W (g·n + b) + c = (W diag(g)) n +
(W b + c).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PhiConfig, PreTrainedModel

from attention.conversion.convert import build, unshare
from attention.families import families, family_of, geometry_of
from attention.heads import LayerHeads
from attention.io.targets import EngineSupport, Lowered, Target, TargetError, _stock, gqa
from attention.io.targets._pairs import check_no_composition, kv_heads_of, widths_of, written_out
from attention.io.targets._wide import support_wide
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan

_SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "hidden_act", "attention_dropout", "max_position_embeddings", "initializer_range",
    "layer_norm_eps", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


_FOLDED_NORMS_NOTE = "layer norms' scales and shifts folded into the projections that read them"


def phi_config(config: Any) -> PhiConfig:
    """Return the Phi config of a GPT-NeoX config.

    Raises:
        TargetError: For another family or a serial residual.
    """
    _check(config)
    fields = {name: getattr(config, name) for name in _SAME}
    rope = copy.deepcopy(config.rope_parameters)
    return PhiConfig(
        **fields, rope_parameters=rope, resid_pdrop=config.hidden_dropout, tie_word_embeddings=False
    )


@support_wide
def support_for(config: Any, plan: AttentionPlan) -> EngineSupport:
    """As target gqa. Raises TargetError for another family, a serial residual or composition."""
    _check(config)
    check_no_composition(plan, "phi")
    count = max(kv_heads_of(plan))
    layers = plan.num_layers
    return EngineSupport.of(
        [count] * layers, plan.head_dim, [count * max(widths_of(plan))] * layers
    )


def is_needed(config: Any, plan: AttentionPlan) -> bool:
    """Whether a GPT-NeoX has groups, which it can only have as Phi."""
    grouped = not all(layer.is_identity for layer in plan.layers)
    return family_of(config).name == "gpt_neox" and grouped and config.use_parallel_residual


def _check(config: Any) -> None:
    if family_of(config).name != "gpt_neox":
        raise TargetError(
            f"target phi takes a gpt_neox checkpoint, got {family_of(config).name}; use target gqa"
        )
    if not config.use_parallel_residual:
        raise TargetError(
            "target phi needs use_parallel_residual=true: Phi has attention and MLP side by side"
        )


def _fold(weight: Tensor, bias: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Fold a norm into a weight `[..., rows, D]` and a bias `[..., rows]` that read its output."""
    shift = weight.double() @ norm.bias.double()
    return weight * norm.weight, (shift if bias is None else shift + bias.double()).to(weight.dtype)


def fold_heads(heads: LayerHeads, norm: nn.LayerNorm) -> LayerHeads:
    """Heads that read the normalised input.

    Biases where there were none, as Phi has them everywhere.
    """
    (q, q_bias), (k, k_bias), (v, v_bias) = (
        _fold(rows, bias, norm)
        for rows, bias in (
            (heads.q, heads.q_bias),
            (heads.k, heads.k_bias),
            (heads.v, heads.v_bias),
        )
    )
    o_bias = heads.o.new_zeros(heads.hidden_size) if heads.o_bias is None else heads.o_bias
    return replace(heads, q=q, k=k, v=v, q_bias=q_bias, k_bias=k_bias, v_bias=v_bias, o_bias=o_bias)


def _copy(target: Any, weight: Tensor, bias: Tensor | None) -> None:
    target.weight.copy_(weight)
    target.bias.zero_() if bias is None else target.bias.copy_(bias)


@torch.no_grad()
def as_phi(model: PreTrainedModel) -> PreTrainedModel:
    """Return a Headfold Phi with the plan of a (Headfold or stock) GPT-NeoX and equal logits."""
    model = unshare(model)  # each layer's norm is folded into its own projections
    phi = build(phi_config(model.config), plan_of(model), model.dtype)
    nn.Module.to(phi, model.device)
    source: Any = model.get_decoder()
    target: Any = phi.get_decoder()
    lm_head: Any = model.get_output_embeddings()
    target.embed_tokens.weight.copy_(source.embed_in.weight)
    _copy(target.final_layernorm, source.final_layer_norm.weight, source.final_layer_norm.bias)
    _copy(phi.get_output_embeddings(), lm_head.weight, None)
    geometry = geometry_of(model.config)
    family = families()["phi"]
    for old, new in zip(source.layers, target.layers, strict=True):
        new.input_layernorm.weight.fill_(1)
        new.input_layernorm.bias.zero_()
        heads = family_of(model.config).read(old.attention, geometry)
        family.write(new.self_attn, fold_heads(heads, old.input_layernorm))
        up = old.mlp.dense_h_to_4h
        down = old.mlp.dense_4h_to_h
        _copy(new.mlp.fc1, *_fold(up.weight, up.bias, old.post_attention_layernorm))
        _copy(new.mlp.fc2, down.weight, down.bias)
    phi.generation_config = model.generation_config
    return phi.train(model.training)


def lower(model: PreTrainedModel) -> Lowered:
    """Return the stock Phi form of a GPT-NeoX. Raises TargetError as `support_for` does."""
    support_for(model.config, plan_of(model))
    return lower_as_phi(model, gqa.lower)


def lower_as_phi(model: PreTrainedModel, lower: Callable[[PreTrainedModel], Lowered]) -> Lowered:
    """Return what the `lower` of a target makes of the Phi form of a GPT-NeoX."""
    lowered = lower(as_phi(model))
    notes = (*lowered.notes, _FOLDED_NORMS_NOTE, *written_out(plan_of(model)))
    return replace(lowered, notes=notes, folded=True)


TARGET = Target("phi", ("transformers", "vLLM"), support_for, lower, _stock.write, _stock.read)
