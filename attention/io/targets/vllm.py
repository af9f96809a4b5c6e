"""vLLM.

A stock folder where one KV head count serves all layers. Else DeciLM for families whose maths is
Llama's, and target per_layer for the others, which vLLM's Transformers backend serves.

DeciLM is vLLM's `DeciLMForCausalLM` (file `nemotron_nas`): Llama with
`block_configs[l].attention.n_heads_in_group`. It has one number N of query heads for all layers,
which every layer's KV heads must divide: zero query heads make up the rest
(`attention.io.targets._pairs`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from attention.base.messages import reason
from attention.conversion.convert import unshare
from attention.families import family_of, geometry_of, window_of
from attention.heads import LayerHeads
from attention.io.precision import DTYPES
from attention.io.stock_files import older_form, put_tokenizer
from attention.io.targets import (
    EngineSupport,
    Lowered,
    Target,
    TargetError,
    _stock,
    gqa,
    per_layer,
    phi,
)
from attention.io.targets._pairs import (
    check_no_composition,
    check_query_heads,
    kv_heads_of,
    pad,
    query_heads_for_all,
    unpad,
    written_out,
)
from attention.io.targets._vllm import check_computed, takes_width
from attention.io.targets._wide import lowering_wide, support_wide
from attention.modeling.model_classes import (
    family_fields,
    has_foreign_counts,
    plan_of,
    plan_of_config,
)
from attention.plan import AttentionPlan

_DECI = "nemotron-nas"
_CODE = Path(__file__).parent / "_code" / "configuration_decilm.py"
OF_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
TRUSTING = " --trust-remote-code"
BACKEND = f"{TRUSTING} --model-impl transformers"
"""Options of `vllm serve` for a folder with code: for DeciLM, and for target per_layer."""
LLAMA_LIKE = ("llama", "mistral", "qwen2")


@support_wide
def support_for(config: Any, plan: AttentionPlan) -> EngineSupport:
    """Return the KV heads of each layer in the export.

    The counts of layers may differ, as DeciLM or as in target per_layer. A GPT-NeoX has one count
    for all layers, as in target phi, and so do models that neither of the two supports, as in
    target gqa: a model with windows, for one.

    Raises:
        TargetError: For composition, for families without groups, and for counts with no small
            common multiple.
    """
    check_no_composition(plan, "vllm")
    check_computed(config)
    if phi.is_needed(config, plan):
        return phi.support_for(config, plan)
    if not has_own_counts(config, plan):
        return _other(config, plan).support_for(config, plan)
    counts = kv_heads_of(plan)
    heads = check_query_heads(plan)
    return EngineSupport.of(counts, plan.head_dim, [heads] * plan.num_layers)


def has_own_counts(config: Any, plan: AttentionPlan) -> bool:
    """Whether a plan is written as DeciLM, which has the maths of Llama.

    Where layers differ, and where vLLM does not take the heads of the stock form.
    """
    family = family_of(config).name
    if family not in LLAMA_LIKE or window_of(config):
        return False
    if len(set(kv_heads_of(plan))) > 1:
        return True
    return not takes_width(config, plan)


def _other(config: Any, plan: AttentionPlan) -> ModuleType:
    """Return the target that writes what is no DeciLM: per_layer where it takes the plan.

    With windows vLLM was seen to allocate other bytes than those of the counts.
    """
    if window_of(config):
        return gqa
    try:
        per_layer.support_for(config, plan)
    except TargetError:
        return gqa
    return per_layer


@lowering_wide
def lower(model: PreTrainedModel) -> Lowered:
    """Return the model as it is where it is written as DeciLM, heads being padded then.

    Else as per_layer, gqa or phi.
    """
    plan = plan_of(model)
    support_for(model.config, plan)
    if phi.is_needed(model.config, plan):
        return phi.lower(model)
    if not has_own_counts(model.config, plan):
        return _other(model.config, plan).lower(model)
    notes = [
        "DeciLM: vLLM is to be started with --trust-remote-code, for the configuration alone",
        *written_out(plan),
    ]
    return Lowered(unshare(model), tuple(notes))


def write(model: PreTrainedModel, folder: Path, dtype: str, tokenizer: Any = None) -> str:
    if has_foreign_counts(model.config):
        return per_layer.write(model, folder, dtype, tokenizer)
    plan = plan_of(model)
    if not has_own_counts(model.config, plan):
        return _stock.write(model, folder, dtype, tokenizer)
    save_torch_state_dict(_state(model, DTYPES[dtype]), folder)
    fields = deci_fields(model.config, plan) | {
        "dtype": dtype,
        "transformers_version": transformers.__version__,
    }
    (folder / "config.json").write_text(
        json.dumps(fields | older_form(fields), indent=2, sort_keys=True) + "\n"
    )
    shutil.copyfile(_CODE, folder / _CODE.name)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        put_tokenizer(tokenizer, folder)
    return _DECI


def deci_fields(config: Any, plan: AttentionPlan) -> dict[str, Any]:
    """Return the fields of config.json of a Llama-like model as DeciLM."""
    heads = query_heads_for_all(plan)
    counts = kv_heads_of(plan)
    family = family_of(config).name
    block = {"no_op": False, "replace_with_linear": False}  # TensorRT-LLM reads both
    ffn = block | ffn_width(config)
    fields = family_fields(config) | {
        "model_type": _DECI,
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {"AutoConfig": f"{_CODE.stem}.DeciLMConfig"},
        "num_attention_heads": heads,
        "num_key_value_heads": max(counts),
        "head_dim": plan.head_dim,
        "block_configs": [
            {"attention": block | {"n_heads_in_group": heads // count}, "ffn": ffn}
            for count in counts
        ],
    }
    if family == "qwen2":
        fields |= {"attention_bias": False, "qkv_bias": True}
    for name in OF_WINDOWS:
        fields.pop(name, None)
    return fields


def ffn_width(config: Any) -> dict[str, float]:
    """Return the width of the MLPs as `ffn_mult` where that is exact, which more readers know.

    vLLM, SGLang and mlx-lm make of it `int(2 / 3 * ffn_mult * model width)`, rounded up to a
    multiple of 256; mlx-lm keeps six of its decimals.
    """
    width = config.intermediate_size
    mult = round(3 * width / (2 * config.hidden_size), 6)
    if -(-int(2 * mult * config.hidden_size / 3) // 256) * 256 == width:
        return {"ffn_mult": mult}
    return {"intermediate_size": width}


def _padded(model: PreTrainedModel) -> Iterator[tuple[str, LayerHeads]]:
    """Yield the attention modules by name, and their heads as DeciLM has them."""
    plan = plan_of(model)
    family = family_of(model.config)
    geometry = geometry_of(model.config)
    heads = query_heads_for_all(plan)
    counts = kv_heads_of(plan)
    names = {id(module): name for name, module in model.named_modules()}
    for module, layer, count in zip(
        family.attention_modules(model), plan.layers, counts, strict=True
    ):
        yield names[id(module)], pad(family.read(module, geometry), layer, count, heads // count)


def _state(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors under the names of a stock Llama."""
    state = {
        name: tensor for name, tensor in model.state_dict().items() if ".self_attn." not in name
    }
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for name, heads in _padded(model):
        rows = {
            "q_proj": (heads.q.flatten(0, 1), heads.q_bias),
            "k_proj": (heads.k.flatten(0, 1), heads.k_bias),
        }
        rows |= {"v_proj": (heads.v.flatten(0, 1), heads.v_bias)}
        rows |= {"o_proj": (heads.o.permute(1, 0, 2).flatten(1), heads.o_bias)}
        for part, (weight, bias) in rows.items():
            state[f"{name}.{part}.weight"] = weight
            if bias is not None:
                state[f"{name}.{part}.bias"] = bias.flatten()
    return {name: tensor.detach().to(dtype).contiguous() for name, tensor in state.items()}


@torch.no_grad()
def read(folder: Path, config: Any) -> PreTrainedModel:
    """Return the model of a written folder.

    Raises:
        TargetError: If it is not whole or its padding is not what was written.
    """
    if has_foreign_counts(config):
        return _stock.read_with_code(folder, config)
    plan = plan_of_config(config)
    if not has_own_counts(config, plan):
        return _stock.read(folder, config)
    stored = {
        name: t.float()
        for file in folder.glob("*.safetensors")
        for name, t in load_file(file).items()
    }
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    family = family_of(config)
    d = plan.head_dim
    names = {id(m): name for name, m in model.named_modules()}
    try:
        for name, tensor in model.state_dict().items():
            if ".self_attn." not in name and not (
                name == "lm_head.weight" and config.tie_word_embeddings
            ):
                tensor.copy_(stored[name])
        for module, layer in zip(family.attention_modules(model), plan.layers, strict=True):
            family.write(module, unpad(_stored_heads(stored, names[id(module)], d), layer))
    except (KeyError, RuntimeError, ValueError) as error:
        raise TargetError(f"{str(folder)!r} is not what was written: {reason(error)}") from None
    model.tie_weights()
    return model.eval()


def _stored_heads(stored: dict[str, Tensor], name: str, head_dim: int) -> LayerHeads:
    q, k, v = (stored[f"{name}.{part}_proj.weight"].unflatten(0, (-1, head_dim)) for part in "qkv")
    biases = (stored.get(f"{name}.{part}_proj.bias") for part in "qkv")
    q_bias, k_bias, v_bias = (None if bias is None else bias.view(-1, head_dim) for bias in biases)
    o = stored[f"{name}.o_proj.weight"].unflatten(1, (-1, head_dim)).permute(1, 0, 2)
    return LayerHeads(q, k, v, o, q_bias, k_bias, v_bias, stored.get(f"{name}.o_proj.bias"))


TARGET = Target("vllm", ("vLLM",), support_for, lower, write, read)
