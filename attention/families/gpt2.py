"""GPT-2: fused c_attn, a Conv1D (weights `[in, out]`).

Learned positions, so keys take any orthogonal map; biases.

Legend: H heads, d head dim, D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from attention.families import Family, _separate, _uneven
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.modeling.growing_cache import take_cache


def geometry(config: Any) -> HeadGeometry:
    """Return the geometry of a GPT-2.

    Raises:
        ValueError: For a model with cross-attention, whose second cache a plan does not describe.
    """
    if config.add_cross_attention:
        raise ValueError(
            "a GPT-2 with add_cross_attention=true is not supported; expected a decoder alone"
        )
    return _uneven.geometry(config, "gpt2", 0, True)


class UnevenGPT2Attention(GPT2Attention):
    """GPT-2's attention with separate projections and any number of key and value heads."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if encoder_hidden_states is not None:
            raise ValueError("a converted GPT-2 has no cross-attention, got encoder_hidden_states")
        states = _uneven.project(self, hidden_states, self.head_dim)
        rates = {"scaling": self.scaling, "dropout": self.attn_dropout.p}
        mixed, weights = _uneven.attend(
            self, states, attention_mask, take_cache(kwargs), **rates, **kwargs
        )
        return self.resid_dropout(self.c_proj(mixed)), weights


def attention_modules(model: PreTrainedModel) -> Sequence[nn.Module]:
    decoder: Any = model.get_decoder()
    return [block.attn for block in decoder.h]


def read(module: Any, geometry: HeadGeometry) -> LayerHeads:
    H = geometry.num_heads
    d = geometry.head_dim
    D = geometry.hidden_size
    o = module.c_proj.weight.detach().view(H, -1, D).transpose(1, 2)
    o_bias = module.c_proj.bias.detach()
    if isinstance(module, UnevenGPT2Attention):
        (q, k, v), (q_bias, k_bias, v_bias) = _separate.read_qkv(module, H, o.shape[2])
    else:
        q, k, v = module.c_attn.weight.detach().T.view(3, H, d, D).unbind(0)
        q_bias, k_bias, v_bias = module.c_attn.bias.detach().view(3, H, d).unbind(0)
    return LayerHeads(q, k, v, o, q_bias, k_bias, v_bias, o_bias)


@torch.no_grad()
def write(module: Any, heads: LayerHeads) -> None:
    if isinstance(module, UnevenGPT2Attention):
        _separate.write_qkv(module, heads)
    else:
        rows = torch.cat([heads.q, heads.k, heads.v]).flatten(0, 1)
        module.c_attn.weight.copy_(rows.T)
        if heads.q_bias is not None and heads.k_bias is not None and heads.v_bias is not None:
            module.c_attn.bias.copy_(
                torch.cat([heads.q_bias, heads.k_bias, heads.v_bias]).flatten()
            )
    module.c_proj.weight.copy_(heads.o.transpose(1, 2).reshape(module.c_proj.weight.shape))
    if heads.o_bias is not None:
        module.c_proj.bias.copy_(heads.o_bias)


FAMILY = Family(
    name="gpt2",
    config_class=GPT2Config,
    model_class=GPT2LMHeadModel,
    geometry=geometry,
    attention_modules=attention_modules,
    read=read,
    reshape=partial(_uneven.reshape, "c_attn", UnevenGPT2Attention),
    write=write,
    plain_config=_uneven.plain_config,
    separate=partial(_uneven.separate, "c_attn", UnevenGPT2Attention),
)
