"""A Llama with composed heads.

The scores of each head are a mix of those of all heads (`composing.py` in this folder).

`config.composition` has the settings, `config.windows` the attention window of each layer (0:
none). The key-side weights of tokens are in the cache too, behind the layers' keys and values. All
else is as in `modeling_head_maps.py`. Load with `AutoModelForCausalLM.from_pretrained(folder,
trust_remote_code=True)`.
"""

from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .composing import HeadComposition  # pyright: ignore[reportMissingImports]
from .modeling_head_maps import HeadMapsConfig, HeadMapsForCausalLM, spread

NAME = "composed_heads"


class ComposedHeadsConfig(HeadMapsConfig):
    model_type = "composed_heads_llama"

    def __init__(self, composition: Any = None, windows: Any = (), **fields: Any) -> None:
        super().__init__(**fields)
        self.composition = composition
        self.windows = windows


def check_cache(cache: Any) -> None:
    """Raise ValueError for a cache with places for later tokens, which composed heads would see."""
    if cache is not None and type(cache) is not DynamicCache:
        raise ValueError(f"composed heads need a DynamicCache, got {type(cache).__name__}")


def remembered(cache: Any, layer: int, layers: int, weights: Tensor) -> Tensor:
    """Put key-side weights of new tokens `[batch, tokens, n]` into the cache.

    Return those of all tokens.

    They have a separate cache layer, without values, so that every operation on a cache is applied
    to them.
    """
    while len(cache.layers) < 2 * layers:
        cache.layers.append(DynamicLayer())
    states = weights.unsqueeze(1)
    return cache.update(states, states[..., :0], layers + layer)[0].squeeze(1)


def hand_on(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Give the attention function the input of the module and its cache."""
    composed_input = args[0] if args else kwargs["hidden_states"]
    # Its name since transformers 5.24, and before.
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    return args, {**kwargs, "composed_input": composed_input, "composed_cache": cache}


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    composed_input: Tensor,
    composed_cache: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention with scores and weights composed: an attention function of transformers."""
    composition = module.composition
    weights = module.composition.key_weights(composed_input)
    check_cache(composed_cache)
    if composed_cache is not None and weights is not None:
        weights = remembered(
            composed_cache, module.layer_idx, module.config.num_hidden_layers, weights
        )
    if composition.norm is not None:
        query, key = composition.norm(query, key)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query * factor) @ spread(key, module.key_map).transpose(-1, -2)
    mixed = composition(scores, composed_input, weights, attention_mask, dropout)
    return (mixed @ spread(value, module.value_map)).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


class ComposedHeadsForCausalLM(HeadMapsForCausalLM):
    config_class = ComposedHeadsConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        settings = SimpleNamespace(**config.composition)
        for layer, window in zip(self.model.layers, config.windows, strict=True):
            attention: Any = layer.self_attn
            attention.composition = HeadComposition(
                config.num_attention_heads, config.hidden_size, settings, window
            )
            attention.register_forward_pre_hook(hand_on, with_kwargs=True)
        self.config._attn_implementation = NAME
