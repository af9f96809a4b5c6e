"""The fields of a GGUF file that describe the model, from a transformers config."""

from __future__ import annotations

from typing import Any

import gguf

from attention.families import geometry_of
from attention.io.targets._gguf.architectures import Architecture, shapes_of
from attention.plan import AttentionPlan


def write_metadata(
    writer: gguf.GGUFWriter, config: Any, form: Architecture, plan: AttentionPlan
) -> None:
    geometry = geometry_of(config)
    shapes = shapes_of(plan, form)
    heads = [count * width for count, width in shapes]
    kv_heads = [count for count, _ in shapes]
    layers = geometry.num_layers
    writer.add_context_length(geometry.max_positions)
    writer.add_embedding_length(geometry.hidden_size)
    writer.add_block_count(layers)
    width = _feed_forward(config)
    writer.add_feed_forward_length([width] * layers if form.own_counts else width)
    writer.add_head_count(heads if form.own_counts else heads[0])
    writer.add_head_count_kv(kv_heads if form.own_counts else kv_heads[0])
    writer.add_key_length(geometry.head_dim)
    writer.add_value_length(geometry.head_dim)
    writer.add_vocab_size(geometry.vocab_size)
    if form.rms_norm:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        eps = getattr(config, "layer_norm_eps", None) or getattr(config, "layer_norm_epsilon", 1e-5)
        writer.add_layer_norm_eps(eps)
    if experts := getattr(config, "num_local_experts", None) or getattr(
        config, "num_experts", None
    ):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(
            getattr(config, "moe_intermediate_size", None) or width
        )
    if form.name == "gptneox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if geometry.rotary.dims:
        _describe_rope(writer, config, geometry.rotary.dims)


def _feed_forward(config: Any) -> int:
    for name in ("intermediate_size", "n_inner", "ffn_dim"):
        if getattr(config, name, None):
            return getattr(config, name)
    return 4 * config.hidden_size


def _describe_rope(writer: gguf.GGUFWriter, config: Any, dims: int) -> None:
    rope = config.rope_parameters
    writer.add_rope_dimension_count(dims)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
