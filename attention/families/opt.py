"""OPT: learned positions and no rotary embedding, so keys take any orthogonal map; biases are one switch for all."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM
from transformers.cache_utils import Cache
from transformers.models.opt.modeling_opt import OPTAttention

from attention.families import Family, _separate, _uneven
from attention.geometry import HeadGeometry, RotaryLayout
from attention.plan import LayerPlan


def geometry(config: Any) -> HeadGeometry:
    bias, head_dim = bool(config.enable_bias), config.hidden_size // config.num_attention_heads
    return HeadGeometry(
        family="opt",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=head_dim,
        rotary=RotaryLayout.none(head_dim),
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=bias,
        qk_norm=False,
        max_positions=config.max_position_embeddings,
        vocab_size=config.vocab_size,
    )


class UnevenOPTAttention(OPTAttention):
    """OPT's attention with any number of key and value heads."""

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = _uneven.project(self, hidden_states, self.head_dim)
        # As in the stock forward, queries are scaled before the product and the product is not.
        mixed, weights = _uneven.attend(
            self,
            q * self.scaling,
            k,
            v,
            attention_mask,
            past_key_values,
            scaling=1.0,
            dropout=self.dropout,
            **kwargs,
        )
        return self.out_proj(mixed), weights


def reshape(module: Any, geometry: HeadGeometry, plan: LayerPlan) -> None:
    if not plan.is_identity:
        _separate.reshape(module, geometry, plan)
        module.__class__ = UnevenOPTAttention


FAMILY = Family(
    name="opt",
    config_class=OPTConfig,
    model_class=OPTForCausalLM,
    geometry=geometry,
    attention_modules=_separate.attention_modules,
    read=_separate.read,
    reshape=reshape,
    write=_separate.write,
    plain_config=_uneven.plain_config,
)
