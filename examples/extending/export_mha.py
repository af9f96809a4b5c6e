"""An export target: multi-head attention, for software without shared heads. Its place: attention/io/targets/mha.py.

Every query head gets a separate key and value head, so the cache grows to that of multi-head
attention:
`headfold export DIR --target mha --allow-larger-cache --out DIR2`.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from attention.conversion.convert import assemble, lift
from attention.io import checkpoint
from attention.io.targets import EngineSupport, Lowered, Target, _stock
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan


def support_for(config: Any, plan: AttentionPlan) -> EngineSupport:
    """Allow as many KV heads as query heads, in every layer."""
    return EngineSupport.of([plan.num_heads] * plan.num_layers, plan.head_dim)


def lower(model: PreTrainedModel) -> Lowered:
    """The same model with each shared head written out for each of its query heads; the maths is the same."""
    plan = plan_of(model)
    whole = AttentionPlan.identity(len(plan.layers), plan.num_heads, plan.head_dim)
    expanded = assemble(model, whole, lift(model))
    return Lowered(checkpoint.to_plain(expanded), notes=("shared heads are written out",))


# Vaswani 2017, section 3.2.2
TARGET = Target("mha", ("transformers", "vLLM", "llama.cpp"), support_for, lower, _stock.write, _stock.read)
