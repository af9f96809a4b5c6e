"""A Llama with a number of key and value heads per layer.

`config.per_layer_config[l].num_key_value_heads`, as transformers defines that key: each attention
layer is transformers' own, built from the configuration of its layer. All else is transformers' own
model. Load with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`, or start
`vllm serve folder --trust-remote-code --model-impl transformers`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import LlamaForCausalLM, LlamaModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)


@contextmanager
def global_counts(config: Any) -> Iterator[None]:
    """Let transformers build all layers alike, with the counts of the whole model."""
    config.allow_global_per_layer_attribute_access = True
    try:
        yield
    finally:
        del config.__dict__["allow_global_per_layer_attribute_access"]


def size_layers(decoder: Any) -> None:
    """Build the attention of each layer again, from the configuration of that layer."""
    config = decoder.config
    for index, layer in enumerate(decoder.layers):
        attention = type(layer.self_attn)(config.per_layer_config[index], layer_idx=index)
        attention.config = config  # that of the model names the attention function
        layer.self_attn = attention


class PerLayerLlamaModel(LlamaModel):
    def __init__(self, config: Any) -> None:
        with global_counts(config):
            super().__init__(config)
        size_layers(self)
        self.post_init()


class PerLayerLlamaForCausalLM(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        with global_counts(config):
            super().__init__(config)
        size_layers(self.model)
        self.post_init()


# transformers maps the names in the files for its own classes, and for registered ones.
stock: Any = LlamaModel
names: Any = get_checkpoint_conversion_mapping(stock.config_class.model_type)
if names is not None:
    register_checkpoint_conversion_mapping(PerLayerLlamaModel.__name__, names, overwrite=True)
