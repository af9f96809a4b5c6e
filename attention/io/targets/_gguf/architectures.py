"""The names of families in llama.cpp, and its layout of a layer's heads.

Legend: d head dim, r rotary dims of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention.families import family_of, geometry_of, window_of
from attention.heads import LayerHeads
from attention.io.targets import TargetError
from attention.io.targets._pairs import kv_heads_of, widths_of
from attention.plan import AttentionPlan


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp computes and names a model.

    Attributes:
        name: In llama.cpp.
        interleaved: Rotary pairs are dims 2i and 2i + 1 instead of i and i + r/2.
        fused: One projection for queries, keys and values.
        rms_norm: Its norms divide by the root mean square and have no shift.
        own_counts: Whether each layer may have a different number of heads.
        activation: transformers' names for the one between its MLPs' matrices; a file names none.
    """

    name: str
    interleaved: bool = False
    fused: bool = False
    rms_norm: bool = True
    own_counts: bool = False
    activation: tuple[str, ...] = ("silu", "swish")


_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python")
"""Exact or by tanh: llama.cpp computes both by tanh, within the tolerance of a check."""
LLAMA = Architecture("llama", interleaved=True)
OF_FAMILY = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe"),
    "gemma": Architecture("gemma", activation=_GELU),
    "phi": Architecture("phi2", rms_norm=False, activation=_GELU),
    "gpt2": Architecture("gpt2", fused=True, rms_norm=False, activation=_GELU),
    "gpt_neox": Architecture("gptneox", fused=True, rms_norm=False, activation=_GELU),
}
# Families that llama.cpp's own converter writes so, and we do not write.
_INTERLEAVED = ("granite", "smollm3")
_DECI = Architecture("deci", interleaved=True, own_counts=True)
OPENELM = Architecture("openelm", fused=True, own_counts=True)
"""OpenELM is Qwen3 with head counts of each layer's own, if the output matrix is that of the
embeddings."""


def with_own_counts(config: Any) -> Architecture | None:
    """Return the architecture that computes a family with head counts of each layer's own.

    None if there is none.
    """
    family = family_of(config).name
    if family in ("llama", "mistral", "qwen2"):
        return _DECI
    return OPENELM if family == "qwen3" and config.tie_word_embeddings else None


def check_supported(config: Any, plan: AttentionPlan) -> None:
    """Raise TargetError for a model that no architecture of llama.cpp computes."""
    family = family_of(config).name
    geometry = geometry_of(config)
    if family not in OF_FAMILY:
        raise TargetError(
            f"target gguf has no form for {family}, it takes {', '.join(sorted(OF_FAMILY))}: "
            f"export to target vllm"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    types = ("default", "linear", *(["llama3"] if OF_FAMILY[family].interleaved else []))
    if fixed_factors(rope) and (OF_FAMILY[family].interleaved or with_own_counts(config)):
        types = (*types, kind)
    if kind not in types:
        raise TargetError(
            f"target gguf takes a {family} of rope type {', '.join(types)}, got {kind}"
        )
    if 0 < window_of(config) < geometry.max_positions:
        raise TargetError(
            f"target gguf has no sliding window, the model one of {window_of(config)} tokens"
        )
    activation = _activation(config)
    if activation not in (known := OF_FAMILY[family].activation):
        raise TargetError(
            f"llama.cpp computes a {family} with {known[0]}, the model has {activation}; export "
            "to target vllm"
        )
    if family == "gpt2" and (
        config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights
    ):
        raise TargetError(
            "llama.cpp's gpt2 scales scores by the head dim alone "
            f"(scale_attn_by_inverse_layer_idx={config.scale_attn_by_inverse_layer_idx}, "
            f"scale_attn_weights={config.scale_attn_weights}); export to target transformers"
        )
    if family in ("qwen3", "qwen3_moe", "gemma") and geometry.query_bias:
        raise TargetError(f"llama.cpp has no {family} with biases (attention_bias=true)")
    if family == "gemma" and not config.tie_word_embeddings:
        raise TargetError(
            "llama.cpp has no gemma with a separate output matrix (tie_word_embeddings=false)"
        )
    if family == "qwen3_moe":
        _check_qwen3_moe(config)
    if family == "phi":
        _check_phi(geometry.qk_norm, plan)


def _activation(config: Any) -> str:
    """Return transformers' name of the activation of a model's MLPs."""
    names = ("hidden_activation", "hidden_act", "activation_function")
    return next(name for key in names if (name := getattr(config, key, None)))


def fixed_factors(rope: dict[str, Any]) -> bool:
    """Whether rotary frequencies are divided by one set of factors at any length of the text.

    llama.cpp reads such factors as `rope_freqs.weight`. Wide heads have them.
    """
    return (
        rope.get("rope_type") == "longrope"
        and rope.get("short_factor") == rope.get("long_factor")
        and rope.get("attention_factor") == 1.0
    )


def _check_qwen3_moe(config: Any) -> None:
    """Check that every layer has experts whose weights in use sum to one, as in llama.cpp."""
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise TargetError(
            f"llama.cpp has no qwen3_moe with layers without experts "
            f"(mlp_only_layers={config.mlp_only_layers}, "
            f"decoder_sparse_step={config.decoder_sparse_step}); export to target vllm"
        )
    if not config.norm_topk_prob:
        raise TargetError(
            "llama.cpp has no qwen3_moe with norm_topk_prob=false; export to target vllm"
        )


def _check_phi(qk_norm: bool, plan: AttentionPlan) -> None:
    """llama.cpp's phi2 has groups, but no more query heads than the model's width holds."""
    if qk_norm:
        raise TargetError(
            "llama.cpp has no phi whose queries and keys are normalised (qk_layernorm=true)"
        )
    counts = kv_heads_of(plan)
    widths = widths_of(plan)
    if max(counts) * max(widths) != plan.num_heads:
        index = next(
            i
            for i in range(len(counts))
            if (counts[i], widths[i]) != (max(counts), plan.num_heads // max(counts))
        )
        raise TargetError(
            f"layer {index} has {counts[index]} KV heads of up to {widths[index]} query heads, and "
            f"llama.cpp's phi2 "
            "takes equal groups and one count in all layers; choose such a plan, or export to "
            "target transformers"
        )


def architecture(config: Any, plan: AttentionPlan) -> Architecture:
    """Return the architecture that a plan is written as."""
    counts, widths = kv_heads_of(plan), widths_of(plan)
    one_shape = len(set(counts)) == len(set(widths)) == 1
    plain = OF_FAMILY[family_of(config).name]
    if plain.name == "qwen2":  # whose query heads are as wide together as the model
        width = geometry_of(config).hidden_size
        one_shape = one_shape and counts[0] * widths[0] * plan.head_dim == width
    # Of those that divide frequencies by factors of the file
    factors = fixed_factors(getattr(config, "rope_parameters", None) or {})
    if one_shape and (plain.interleaved or not factors):
        return plain
    return with_own_counts(config) or plain


def shapes_of(plan: AttentionPlan, form: Architecture) -> list[tuple[int, int]]:
    """KV heads, and query heads to each, of every layer of a file."""
    counts = kv_heads_of(plan)
    widths = widths_of(plan)
    if form.own_counts:
        return list(zip(counts, widths, strict=True))
    return [(max(counts), max(widths))] * plan.num_layers


def key_order(config: Any, plan: AttentionPlan) -> list[int] | None:
    """Return the dims of a query or key head in the order in which llama.cpp has them.

    None where it has them in the model's own.
    """
    family = family_of(config).name
    interleaved = (
        architecture(config, plan).interleaved if family in OF_FAMILY else family in _INTERLEAVED
    )
    return _order(config) if interleaved else None


def interleave(heads: LayerHeads, config: Any) -> LayerHeads:
    """Rotary halves (dims i and i + r/2) as neighbours (2i and 2i + 1), in queries and keys."""
    order = torch.tensor(_order(config))
    return _ordered(heads, order)


def halve(heads: LayerHeads, config: Any) -> LayerHeads:
    """Return the inverse of `interleave`."""
    return _ordered(heads, torch.tensor(_order(config)).argsort())


def _order(config: Any) -> list[int]:
    rotary = geometry_of(config).rotary
    pairs = zip(rotary.first, rotary.second, strict=True)
    return [dim for pair in pairs for dim in pair] + list(rotary.free)


def _ordered(heads: LayerHeads, order: Tensor) -> LayerHeads:
    changed: dict[str, Any] = {
        name: None if rows is None else rows[:, order]
        for name in ("q", "k", "q_bias", "k_bias")
        for rows in (getattr(heads, name),)
    }
    return replace(heads, **changed)
