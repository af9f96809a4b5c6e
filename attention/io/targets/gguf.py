"""llama.cpp: one file `model.gguf` with weights, configuration and tokenizer.

Architecture `llama`, or `deci` where layers have KV head counts of their own; the architectures of other families have
one count for all layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from attention.families import family_of
from attention.io.targets import Held, Lowered, Target, TargetError, _stock, gqa
from attention.io.targets._pairs import check_no_composition, kv_heads_of
from attention.plan import AttentionPlan

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "phi": "phi2",
    "gpt2": "gpt2", "gpt_neox": "gptneox",
}  # fmt: skip
"""Families that llama.cpp has, and what it calls them."""
OWN_COUNTS = ("llama", "mistral", "qwen2")
"""Families that `deci` computes, with a count of KV heads and of query heads for each layer."""


def held(config: Any, plan: AttentionPlan) -> Held:
    """A count of its own in each layer where `deci` computes the family, else one for all as target gqa. Raises
    TargetError for composition, for a family that llama.cpp has not, and where it has no groups."""
    check_no_composition(plan, "gguf")
    family = family_of(config).name
    if family not in ARCHITECTURES:
        raise TargetError(
            f"llama.cpp has no {family}; target gguf takes {', '.join(sorted(ARCHITECTURES))}: export to target vllm"
        )
    if family in OWN_COUNTS:
        return Held.of(kv_heads_of(plan), plan.head_dim)
    return gqa.held(config, plan)


def lower(model: PreTrainedModel) -> Lowered:
    raise NotImplementedError


def write(model: PreTrainedModel, folder: Path, dtype: str, tokenizer: Any = None) -> str:
    raise NotImplementedError


TARGET = Target("gguf", ("llama.cpp",), held, lower, write, _stock.read, ("float32", "bfloat16", "float16", "q8_0"))
