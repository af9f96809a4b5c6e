"""Fixtures that every test folder shares: the demo checkpoint, and tiny random models of each family."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a hub name must fail at once, not after half a minute of retries
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO = REPOSITORY / "examples" / "stdlib-llama"

TINY: dict[str, Any] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
TINY_SETTINGS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture(scope="session", autouse=True)
def _two_cores() -> None:
    """Tests run beside each other and beside Ray workers: one thread each is faster than all fighting."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """Folder of the demo checkpoint."""
    return DEMO


@pytest.fixture(scope="session")
def demo_model() -> PreTrainedModel:
    """The demo checkpoint in float32, in evaluation mode. Shared by the session: do not change it."""
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def demo_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


@torch.no_grad()
def _fill(model: PreTrainedModel, seed: int) -> None:
    """Random values of a size that matters: attention far from uniform, biases and norm weights far from neutral."""
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor, std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator) * std

    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.copy_(normal(parameter, 0.5))
        elif parameter.dim() == 1:
            parameter.copy_(1 + normal(parameter, 0.2))
        elif "embed_tokens" in name:
            parameter.copy_(normal(parameter, 1.0))
        else:
            parameter.copy_(normal(parameter, 1.5 / math.sqrt(parameter.shape[-1])))


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model(family, *, seed=0, **config)`: a random float32 model, 2 layers of 4 heads of 8, made afresh.

    Families: llama, mistral, qwen2, qwen3. Every bias that the family has is random; `attention_bias=True` gives
    Llama and Qwen3 theirs.
    """

    def make(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
        settings = TINY_SETTINGS | ({"sliding_window": None} if family == "mistral" else {}) | overrides
        model = AutoModelForCausalLM.from_config(TINY[family](**settings), dtype=torch.float32)
        _fill(model, seed)
        return model.eval()

    return make
