"""transformers with small modelling files in the folder, for what no engine holds.

Keys and values apart, and composed heads.

The cache stores each layer's key heads and value heads as the plan has them, and the key-side
weights of composition. Loading it requires permission for the code in the folder
(`trust_remote_code`), which does not need Headfold.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedModel

from attention.conversion.convert import unshare
from attention.families import Family, family_of, window_of
from attention.io.precision import DTYPES
from attention.io.stock_files import older_form, put_tokenizer
from attention.io.targets import EngineSupport, Lowered, Target, TargetError, _stock, phi
from attention.io.targets._pairs import written_out
from attention.io.targets._wide import lowering_wide, support_wide
from attention.modeling import scores
from attention.modeling.composition import composing
from attention.modeling.model_classes import family_fields, plan_of
from attention.plan import AttentionPlan

_CODE = Path(__file__).parent / "_code" / "modeling_head_maps.py"
COMPOSED = _CODE.with_name("modeling_composed_heads.py")
FAMILIES = (
    "gemma",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "phi",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Families with separate projections under the same names; GPT-NeoX is written as Phi."""


@support_wide
def support_for(config: Any, plan: AttentionPlan) -> EngineSupport:
    """Return what the plan itself keeps.

    Raises:
        TargetError: For other families, and for composition with features that exclude it.
    """
    family = family_of(config).name
    composed = plan.composition
    if composed is not None and (family == "gpt_neox" or window_of(config)):
        what = "of the gpt_neox family" if family == "gpt_neox" else "with a sliding window"
        raise TargetError(
            f"target transformers has no composition of heads {what}, which every layer from layer "
            f"0 on has (dcmha); "
            "keep the checkpoint in Headfold's own format"
        )
    if family == "gpt_neox":
        return support_for(phi.phi_config(config), plan)
    if family not in FAMILIES:
        raise TargetError(
            f"target transformers takes the families {', '.join((*FAMILIES, 'gpt_neox'))}, got "
            f"{family}; keep the "
            "checkpoint in Headfold's own format"
        )
    keys, values = (
        tuple(getattr(layer, side) for layer in plan.layers)
        for side in ("key_heads", "value_heads")
    )
    others = 0 if composed is None else plan.num_layers * composed.cached_values(plan.num_heads)
    return EngineSupport(keys, values, plan.head_dim, others)


@lowering_wide
def lower(model: PreTrainedModel) -> Lowered:
    """Return the model as it is, without weights shared between layers; a GPT-NeoX as Phi."""
    plan = plan_of(model)
    support_for(model.config, plan)
    if family_of(model.config).name == "gpt_neox":
        return phi.lower_as_phi(model, lower)
    file = _CODE if plan.composition is None else COMPOSED
    note = f"{file.name} in the folder is what transformers runs: load with trust_remote_code=True"
    return Lowered(unshare(model), (note, *written_out(plan)))


def write(model: PreTrainedModel, folder: Path, dtype: str, tokenizer: Any = None) -> str:
    plan = plan_of(model)
    family = family_of(model.config)
    code = _CODE
    classes = "HeadMaps"
    kind = f"head_maps_{family.name}"
    if plan.composition is not None:
        code = COMPOSED
        classes = "ComposedHeads"
        kind = f"composed_heads_{family.name}"
    state = {
        name: tensor.detach().to(DTYPES[dtype]).contiguous()
        for name, tensor in model.state_dict().items()
        if not name.endswith((".key_map", ".value_map"))
    }
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_torch_state_dict(state, folder)
    fields = family_fields(model.config) | {
        "model_type": kind,
        "architectures": [f"{classes}ForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{code.stem}.{classes}Config",
            "AutoModelForCausalLM": f"{code.stem}.{classes}ForCausalLM",
        },
        "key_maps": [layer.key_map for layer in plan.layers],
        "value_maps": [layer.value_map for layer in plan.layers],
        "dtype": dtype,
        "transformers_version": transformers.__version__,
    }
    if plan.composition is not None:
        windows = [plan.composition.window_of(layer) for layer in range(plan.num_layers)]
        fields |= {"composition": asdict(plan.composition), "windows": windows}
    (folder / "config.json").write_text(
        json.dumps(fields | older_form(fields), indent=2, sort_keys=True) + "\n"
    )
    for file in _code_of(plan):
        (folder / file.name).write_text(code_for(file, family))
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        put_tokenizer(tokenizer, folder)
    return kind


def _code_of(plan: AttentionPlan) -> list[Path]:
    """Return the files that run a plan.

    Those of the composition are the very ones that Headfold runs.
    """
    shared = [Path(str(module.__file__)) for module in (composing, scores)]
    return [_CODE] if plan.composition is None else [_CODE, COMPOSED, *shared]


def code_for(file: Path, family: Family) -> str:
    """Return a file for the folder of a family.

    Llama's, with the family's names, and with imports of the other files in the folder.
    """
    model_class = family.model_class.__name__
    config_class = family.config_class.__name__
    text = file.read_text(encoding="utf-8")
    name = model_class.removesuffix("ForCausalLM")
    text = text.replace("LlamaForCausalLM", model_class).replace("LlamaConfig", config_class)
    text = text.replace("head_maps_llama", f"head_maps_{family.name}").replace(
        "A Llama w", f"A {name} w"
    )
    text = text.replace("composed_heads_llama", f"composed_heads_{family.name}")
    return text.replace("from attention.modeling.", "from .")


TARGET = Target("transformers", ("transformers",), support_for, lower, write, _stock.read_with_code)
