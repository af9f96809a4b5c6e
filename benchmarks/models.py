"""The models that are measured: random weights, since no time depends on their values."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from attention.plan import AttentionPlan, LayerPlan
from attention.plan_parts import dense

DEMO = {"num_attention_heads": 8, "head_dim": 32, "intermediate_size": 688, "vocab_size": 2048}
LLAMA_7B = {"num_attention_heads": 32, "head_dim": 128, "intermediate_size": 11_008, "vocab_size": 32_000}


def llama(layers: int, shape: dict[str, int], *, kv_heads: int | None = None, **settings: object) -> LlamaConfig:
    """A Llama of the shape's width with so many layers; multi-head attention unless `kv_heads` is given."""
    heads = shape["num_attention_heads"]
    return LlamaConfig(
        **{
            **shape,
            "hidden_size": heads * shape["head_dim"],
            "num_hidden_layers": layers,
            "num_key_value_heads": heads if kv_heads is None else kv_heads,
            "max_position_embeddings": 65_536,
            "tie_word_embeddings": True,
            **settings,
        }
    )


def random_model(config: LlamaConfig, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """Return a new model in evaluation mode, without changing torch's global generator."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def tokens(sequences: int, length: int, vocabulary: int = 2048) -> Tensor:
    return torch.randint(vocabulary, (sequences, length), generator=torch.Generator().manual_seed(0))


def decoupled_plan(layers: int, heads: int, head_dim: int) -> AttentionPlan:
    """A quarter of the KV heads: in one layer three keys for each value, in the next the other way round; every group
    of a random size and with random members."""
    generator = torch.Generator().manual_seed(0)
    few, many = heads // 8, heads // 2 - heads // 8

    def head_map(groups: int) -> tuple[int, ...]:
        extra = torch.randint(groups, (heads - groups,), generator=generator).tolist()
        owners = [*range(groups), *extra]
        return dense(owners[i] for i in torch.randperm(heads, generator=generator).tolist())

    counts = [(many, few) if layer % 2 == 0 else (few, many) for layer in range(layers)]
    return AttentionPlan(tuple(LayerPlan(head_map(k), head_map(v)) for k, v in counts), head_dim)
