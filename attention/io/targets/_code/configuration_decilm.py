"""Configuration of a Llama with KV head counts of each layer, for vLLM's DeciLMForCausalLM.

`block_configs`: one entry per layer, {"attention": {"no_op": false, "n_heads_in_group": query heads
per KV head}, "ffn": {"no_op": false, "intermediate_size": width of the MLP}}. `intermediate_size`
is replaced by `ffn_mult` where that is exact: the width is then 2 / 3 ffn_mult times the model
width, rounded up to a multiple of 256. All layers have `num_attention_heads` query heads of
`head_dim` numbers. `replace_with_linear` is false in both parts of every entry.
"""

from types import SimpleNamespace
from typing import Any

from transformers import MistralConfig


class DeciLMConfig(MistralConfig):
    # Llama's fields; Llama's own class requires a width that the heads divide.
    model_type = "nemotron-nas"

    def __init__(self, block_configs: Any = (), **fields: Any) -> None:
        fields["sliding_window"] = None
        if "rope_parameters" in fields:  # transformers 4 knows them by this name alone
            fields.setdefault("rope_scaling", fields["rope_parameters"])
        super().__init__(**fields)
        self.block_configs = [
            SimpleNamespace(**{part: SimpleNamespace(**values) for part, values in block.items()})
            for block in block_configs
        ]

    def to_dict(self) -> dict[str, Any]:
        blocks = self.__dict__.pop("block_configs", [])
        try:
            fields = super().to_dict()
        finally:
            self.block_configs = blocks
        return fields | {
            "block_configs": [{part: vars(held) for part, held in vars(b).items()} for b in blocks]
        }
