"""An export target: multi-head attention, for software without shared heads. Its place: attention/io/lowerings/mha.py.

Every query head gets a key and a value head of its own, so the cache grows to that of multi-head attention:
`headfold export DIR --target mha --allow-larger-cache --out DIR2`.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from attention.conversion.conversion import assemble, lift
from attention.io import checkpoint
from attention.io.export import TARGETS, Lowered
from attention.modeling.modeling import plan_of
from attention.plan import AttentionPlan


@TARGETS.part("mha", source="Vaswani 2017, section 3.2.2")
def lower(model: PreTrainedModel) -> Lowered:
    """The same model with each shared head written out for each of its query heads; the maths is the same."""
    plan = plan_of(model)
    whole = AttentionPlan.identity(len(plan.layers), plan.num_heads, plan.head_dim)
    expanded = assemble(model, whole, lift(model))
    return Lowered(checkpoint.to_plain(expanded), exact=True, notes=("shared heads are written out",))
