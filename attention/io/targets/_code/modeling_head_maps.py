"""A Llama whose query heads read individual key heads and value heads.

`config.key_maps[l][h]` and `config.value_maps[l][h]`: the key head and the value head that query
head h of layer l reads. A layer has as many key heads and value heads as its maps name, and as many
in its cache. All else is transformers' own model. Load with
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, cache_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "head_maps"


class HeadMapsConfig(LlamaConfig):
    model_type = "head_maps_llama"

    def __init__(self, key_maps: Any = (), value_maps: Any = (), **fields: Any) -> None:
        if "rope_parameters" in fields:  # transformers 4 knows them by this name alone
            fields.setdefault("rope_scaling", fields["rope_parameters"])
        super().__init__(**fields)
        self.key_maps = key_maps
        self.value_maps = value_maps


@cache
def indices(head_map: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a map on a device, copied once: a copy for each token would make a GPU wait."""
    with torch.inference_mode(False):  # a training may use it later
        return torch.tensor(head_map, device=device)


def spread(states: Tensor, head_map: Sequence[int]) -> Tensor:
    """Return the kept head of each query head, `[batch, query heads, tokens, head dim]`.

    `states` are `[batch, kept heads, tokens, head dim]`.
    """
    return states.index_select(1, indices(tuple(head_map), states.device))


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention with head maps, as an attention function of transformers."""
    key = spread(key, module.key_map)
    value = spread(value, module.value_map)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **others)


AttentionInterface.register(NAME, attend)
# Without a mask function for this attention, padding would be ignored.
AttentionMaskInterface.register(NAME, sdpa_mask)


StaticLayer: Any = getattr(cache_utils, "StaticLayer", object)  # since transformers 4.54


class UnevenStaticLayer(StaticLayer):
    """A static layer of a cache, whose key and value head counts may differ."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        batch, heads, _, width = value_states.shape
        if heads != key_states.shape[1]:
            self.values = value_states.new_zeros(batch, heads, self.max_cache_len, width)
            if not torch.compiler.is_compiling():  # as the stock layer: CUDA graphs need it
                torch._dynamo.mark_static_address(self.values)


SlidingLayer: Any = getattr(cache_utils, "StaticSlidingWindowLayer", None)
UNEVEN: dict[Any, Any] = {StaticLayer: UnevenStaticLayer}
if SlidingLayer is not None and issubclass(SlidingLayer, StaticLayer):
    UNEVEN[SlidingLayer] = type("UnevenSlidingLayer", (UnevenStaticLayer, SlidingLayer), {})


class HeadMapsForCausalLM(LlamaForCausalLM):
    config_class = HeadMapsConfig
    _supports_attention_backend = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer, keys, values in zip(
            self.model.layers, config.key_maps, config.value_maps, strict=True
        ):
            attention: Any = layer.self_attn
            attention.key_map = keys
            attention.value_map = values
            attention.num_key_value_groups = 1  # the maps do the repeating
            for name, heads in (("k_proj", max(keys) + 1), ("v_proj", max(values) + 1)):
                old = getattr(attention, name)
                projection = nn.Linear(
                    old.in_features, heads * attention.head_dim, bias=old.bias is not None
                )
                setattr(attention, name, projection)
        self.config._attn_implementation = NAME
        self.post_init()

    def _prepare_static_cache(self, *args: Any, **named: Any) -> Any:
        static = super()._prepare_static_cache(*args, **named)  # type: ignore[misc]
        for layer in static.layers:
            layer.__class__ = UNEVEN.get(type(layer), type(layer))
        return static

    def _get_static_cache_init_shape(self) -> None:
        """Let each layer take its counts at first use."""
