"""OPT: learned positions and no rotary embedding, so keys take any orthogonal map.

Biases are one switch for all.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM
from transformers.models.opt.modeling_opt import OPTAttention

from attention.families import _separate, _uneven
from attention.geometry import HeadGeometry
from attention.modeling.growing_cache import take_cache
from attention.plan import LayerPlan


def geometry(config: Any) -> HeadGeometry:
    return _uneven.geometry(config, "opt", 0, bool(config.enable_bias))


class UnevenOPTAttention(OPTAttention):
    """OPT's attention with any number of key and value heads."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = _uneven.project(self, hidden_states, self.head_dim)
        # As in the stock forward, queries are scaled before the product and the product is not.
        states = (q * self.scaling, k, v)
        rates = {"scaling": 1.0, "dropout": self.dropout}
        mixed, weights = _uneven.attend(
            self, states, attention_mask, take_cache(kwargs), **rates, **kwargs
        )
        return self.out_proj(mixed), weights


def reshape(module: Any, geometry: HeadGeometry, plan: LayerPlan) -> None:
    if not plan.is_identity:
        _separate.reshape(module, geometry, plan)
        module.__class__ = UnevenOPTAttention


FAMILY = _separate.family(
    "opt", OPTConfig, OPTForCausalLM, geometry, reshape=reshape, plain_config=_uneven.plain_config
)
