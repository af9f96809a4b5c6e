"""GPT-NeoX and Pythia: fused query_key_value, interleaved head by head; partial rotary embedding.

Legend: H heads, d head dim, D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, apply_rotary_pos_emb

from attention.families import Family, _separate, _uneven
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads


def geometry(config: Any) -> HeadGeometry:
    head_dim = config.hidden_size // config.num_attention_heads
    rotary = int(head_dim * float(config.rope_parameters.get("partial_rotary_factor", 1.0)))
    return _uneven.geometry(config, "gpt_neox", rotary, bool(config.attention_bias))


class UnevenGPTNeoXAttention(GPTNeoXAttention):
    """GPT-NeoX's attention with separate projections and any number of key and value heads."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        layer_past: Cache | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = _uneven.project(self, hidden_states, self.head_size)
        if position_embeddings is None:
            raise ValueError("GPT-NeoX attention needs position_embeddings (cos, sin), got None")
        states = (*apply_rotary_pos_emb(q, k, *position_embeddings), v)
        rates = {"scaling": self.scaling, "dropout": self.attention_dropout}
        mixed, weights = _uneven.attend(self, states, attention_mask, layer_past, **rates, **kwargs)
        return self.dense(mixed), weights


def attention_modules(model: PreTrainedModel) -> Sequence[nn.Module]:
    decoder: Any = model.get_decoder()
    return [layer.attention for layer in decoder.layers]


def read(module: Any, geometry: HeadGeometry) -> LayerHeads:
    if isinstance(module, UnevenGPTNeoXAttention):
        return _separate.read(module, geometry)
    H = geometry.num_heads
    d = geometry.head_dim
    D = geometry.hidden_size
    fused = module.query_key_value
    dense = module.dense
    q, k, v = fused.weight.detach().view(H, 3, d, D).unbind(1)
    none = (None, None, None)
    q_bias, k_bias, v_bias = (
        none if fused.bias is None else fused.bias.detach().view(H, 3, d).unbind(1)
    )
    o = dense.weight.detach().view(D, H, d).permute(1, 0, 2)
    return LayerHeads(
        q, k, v, o, q_bias, k_bias, v_bias, None if dense.bias is None else dense.bias.detach()
    )


@torch.no_grad()
def write(module: Any, heads: LayerHeads) -> None:
    if isinstance(module, UnevenGPTNeoXAttention):
        _separate.write(module, heads)
        return
    fused = module.query_key_value
    fused.weight.copy_(torch.stack([heads.q, heads.k, heads.v], 1).reshape(fused.weight.shape))
    if (
        fused.bias is not None
        and heads.q_bias is not None
        and heads.k_bias is not None
        and heads.v_bias is not None
    ):
        fused.bias.copy_(torch.stack([heads.q_bias, heads.k_bias, heads.v_bias], 1).reshape(-1))
    _separate.write_output(module.dense, heads)


FAMILY = Family(
    name="gpt_neox",
    config_class=GPTNeoXConfig,
    model_class=GPTNeoXForCausalLM,
    geometry=geometry,
    attention_modules=attention_modules,
    read=read,
    reshape=partial(_uneven.reshape, "query_key_value", UnevenGPTNeoXAttention),
    write=write,
    plain_config=_uneven.plain_config,
    separate=partial(_uneven.separate, "query_key_value", UnevenGPTNeoXAttention),
)
