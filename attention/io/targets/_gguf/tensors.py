"""The tensors of a GGUF file: names, layout and types, both ways.

Legend: D model dim, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.families import Family, family_of, geometry_of
from attention.heads import LayerHeads
from attention.io.targets import TargetError
from attention.io.targets._gguf.architectures import (
    Architecture,
    fixed_factors,
    halve,
    interleave,
    shapes_of,
)
from attention.io.targets._pairs import pad, unpad
from attention.modeling.model_classes import plan_of

TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
_BLOCK = 32  # numbers of a row that q8_0 rounds together
_PARTS = {"q": "attn_q", "k": "attn_k", "v": "attn_v"}
_ROPE_FREQUENCIES = "rope_freqs.weight"


def attention_names(model: PreTrainedModel) -> dict[str, int]:
    """Return the attention modules by their names, with the layer of each."""
    layers = {
        id(module): index
        for index, module in enumerate(family_of(model.config).attention_modules(model))
    }
    return {
        name: layers[id(module)] for name, module in model.named_modules() if id(module) in layers
    }


def outside_attention(model: PreTrainedModel, form: Architecture) -> Iterator[tuple[str, Any, str]]:
    """All stored tensors but the projections of attention.

    Transformers' name, the part of it, llama.cpp's name.

    Raises:
        TargetError: For a tensor that the architecture has no place for.
    """
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[form.name], model.config.num_hidden_layers)
    modules = attention_names(model)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        inside = next((m for m in modules if name.startswith(f"{m}.")), None)
        if inside is not None and "norm" not in name:
            continue
        if tied and name.startswith("lm_head."):
            continue
        for part, called in _parts(name, tensor):
            stored_name = names.get_name(called, try_suffixes=(".weight", ".bias"))
            if stored_name is None:
                raise TargetError(
                    f"llama.cpp's {form.name} has no place for {name}; export to another target"
                )
            yield (
                name,
                part,
                stored_name
                if stored_name.endswith((".weight", ".bias"))
                else f"{stored_name}.weight",
            )


def _parts(name: str, tensor: Tensor) -> list[tuple[Any, str]]:
    """Return what llama.cpp keeps apart of one tensor, and what each is called.

    Gates and what they let pass of experts.
    """
    stem, experts, last = name.rpartition(".experts.")
    if not experts or last != "gate_up_proj":
        return [(..., name)]
    half = tensor.shape[1] // 2
    rows = {"gate_proj": slice(half), "up_proj": slice(half, None)}
    return [((slice(None), part), f"{stem}{experts}{one}") for one, part in rows.items()]


def reshaped(name: str, tensor: Tensor, family: Family, back: bool = False) -> Tensor:
    """Return a tensor outside of attention as llama.cpp has it; `back`: the inverse."""
    if family.name == "gemma" and name.endswith("norm.weight"):
        return tensor - 1 if back else tensor + 1  # Gemma multiplies by 1 + weight
    if family.name == "gpt2" and tensor.dim() == 2 and ".mlp.c_" in name:
        return tensor.T.contiguous()  # Conv1D
    return tensor


def layer_tensors(
    heads: LayerHeads, form: Architecture, layer: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the projections of one layer, padded and in the order of the architecture."""
    sides: list[tuple[str, Tensor, Tensor | None]] = [
        (_PARTS[side], getattr(heads, side).flatten(0, 1), getattr(heads, f"{side}_bias"))
        for side in _PARTS
    ]
    if form.fused:
        biases = [bias.flatten() for _, _, bias in sides if bias is not None]
        bias = torch.cat(biases) if biases else None
        sides = [("attn_qkv", torch.cat([weight for _, weight, _ in sides]), bias)]
    for name, weight, bias in [
        *sides,
        ("attn_output", heads.o.permute(1, 0, 2).flatten(1), heads.o_bias),
    ]:
        yield f"blk.{layer}.{name}.weight", weight
        if bias is not None:
            yield f"blk.{layer}.{name}.bias", bias.flatten()


def tensors_of(model: PreTrainedModel, form: Architecture) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a model, in float32."""
    family = family_of(model.config)
    geometry = geometry_of(model.config)
    state = model.state_dict()
    for name, part, stored_name in outside_attention(model, form):
        yield stored_name, reshaped(name, state[name][part], family)
    plan = plan_of(model)
    shapes = shapes_of(plan, form)
    for index, (module, layer) in enumerate(
        zip(family.attention_modules(model), plan.layers, strict=True)
    ):
        heads = pad(family.read(module, geometry), layer, *shapes[index])
        yield from layer_tensors(
            interleave(heads, model.config) if form.interleaved else heads, form, index
        )
    if (frequencies := rope_factors(model)) is not None:
        yield _ROPE_FREQUENCIES, frequencies


def rope_factors(model: PreTrainedModel) -> Tensor | None:
    """Return what llama.cpp divides the rotary frequencies by; None where it knows them itself.

    They are those of Llama 3 and of wide heads.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3" and not fixed_factors(rope):
        return None
    decoder: Any = model.get_decoder()
    scaled = decoder.rotary_emb.inv_freq.double().cpu()
    plain = float(rope["rope_theta"]) ** -(
        torch.arange(len(scaled), dtype=torch.float64) / len(scaled)
    )
    return (plain / scaled).float()


def encoded(name: str, tensor: Tensor, dtype: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """Return a tensor in the type in which it is stored.

    Vectors and positions in float32, as llama.cpp requires.
    """
    array = tensor.detach().float().contiguous().cpu().numpy()
    kind = TYPES[dtype]
    if array.ndim < 2 or name.startswith(("position_embd", "rope_freqs")):
        kind = TYPES["float32"]
    elif dtype == "q8_0" and array.shape[-1] % _BLOCK:
        kind = TYPES["float16"]
    return gguf.quants.quantize(array, kind), kind


@torch.no_grad()
def fill(model: PreTrainedModel, stored: dict[str, Tensor], form: Architecture) -> None:
    """Put the tensors of a file into an empty model of the same config.

    Raises:
        ValueError: If a tensor is missing, or if its padding is not what was written.
    """
    family = family_of(model.config)
    geometry = geometry_of(model.config)
    state = model.state_dict()
    for name, part, stored_name in outside_attention(model, form):
        state[name][part].copy_(reshaped(name, stored[stored_name], family, back=True))
    model.tie_weights()
    d = geometry.head_dim
    for index, (module, layer) in enumerate(
        zip(family.attention_modules(model), plan_of(model).layers, strict=True)
    ):
        heads = stored_heads(stored, index, d)
        heads = halve(heads, model.config) if form.interleaved else heads
        family.write(module, unpad(heads, layer))


def stored_heads(stored: dict[str, Tensor], layer: int, head_dim: int) -> LayerHeads:
    """Return the heads of one layer in the layout of the file."""
    prefix = f"blk.{layer}"
    output = stored[f"{prefix}.attn_output.weight"]
    o_bias = stored.get(f"{prefix}.attn_output.bias")
    o = output.unflatten(1, (-1, head_dim)).permute(1, 0, 2)
    if (fused := stored.get(f"{prefix}.attn_qkv.weight")) is not None:
        rows = o.shape[0] * head_dim
        counts = (rows, (len(fused) - rows) // 2, (len(fused) - rows) // 2)
        weights = fused.split(counts)
        bias = stored.get(f"{prefix}.attn_qkv.bias")
        biases = (None, None, None) if bias is None else bias.split(counts)
    else:
        weights = tuple(stored[f"{prefix}.{name}.weight"] for name in _PARTS.values())
        biases = tuple(stored.get(f"{prefix}.{name}.bias") for name in _PARTS.values())
    q, k, v = (weight.unflatten(0, (-1, head_dim)) for weight in weights)
    q_bias, k_bias, v_bias = (None if bias is None else bias.view(-1, head_dim) for bias in biases)
    return LayerHeads(q, k, v, o, q_bias, k_bias, v_bias, o_bias)
