"""Losses of our forms against means in families whose layers differ from Llama's: norms of queries and keys, caps,
sinks, layers without rotary embedding, experts.

    python -m benchmarks families [--quick]

A small model of each family is trained for some minutes on the standard library's code, and its KV heads are halved.
One seed; such a model has learned little about attention, and a large one may behave otherwise.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Olmo2Config,
    OlmoeConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    SmolLM3Config,
    StableLmConfig,
)

from attention.io import checkpoint
from benchmarks.report import Row, Scale, benchmark
from orchestrator.config.options import ConvertOptions
from orchestrator.tasks.convert import Convert
from trainers.text.data import TextCut, token_set
from trainers.text.token_sets import read_sequences

DEMO = Path(__file__).resolve().parents[1] / "examples" / "stdlib-llama"
SHAPE: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256}
SHAPE |= {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
OWN: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "gemma2": (Gemma2Config, {"sliding_window": 64, "query_pre_attn_scalar": 16}),
    "gpt_oss": (GptOssConfig, {"sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": (SmolLM3Config, {"no_rope_layer_interval": 2}),
    "qwen3": (Qwen3Config, {}),
    "gemma3_text": (Gemma3TextConfig, {"sliding_window": 64, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}),
    "phi, qk_layernorm": (PhiConfig, {"qk_layernorm": True, "tie_word_embeddings": False, "head_dim": None}),
    "stablelm, qk_layernorm": (StableLmConfig, {"qk_layernorm": True, "head_dim": None}),
    "olmo2": (Olmo2Config, {}),
    "olmoe": (OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
}
LENGTH, BATCH, RATE, STEPS = 128, 8, 4e-3, 400


@benchmark("families", devices=())  # by its name alone: it trains
def families(scale: Scale) -> Iterator[Row]:
    """KL of half the KV heads by our keys and values against means, in a small trained model of each family."""
    with tempfile.TemporaryDirectory() as place:
        cut = TextCut("stdlib", "train", scale.pick(4, STEPS * BATCH) * LENGTH, LENGTH)
        text = read_sequences(token_set(cut, AutoTokenizer.from_pretrained(DEMO), place))[:]
        for name in scale.pick(["qwen3", "olmo2"], list(OWN)):
            model = trained(name, text, scale.pick(2, STEPS))
            folder = checkpoint.save(model, Path(place) / name.split(",")[0], DEMO)
            yield from halved(name, folder, place, scale)


def trained(name: str, text: Tensor, steps: int) -> PreTrainedModel:
    """A model of the family after some steps of AdamW on `text` `[N, T]`, the last of them at a falling rate."""
    config: Any = OWN[name][0]
    changes = OWN[name][1]
    settings = {key: value for key, value in (SHAPE | changes).items() if value is not None or key == "pad_token_id"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**settings), dtype=torch.float32).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    fall = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / 20, 2 * (1 - step / steps)))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = text[torch.randint(len(text), (BATCH,), generator=generator)].long()
        model(batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        fall.step()
        optimiser.zero_grad()
    return model.eval()


def halved(name: str, folder: Path, cache: str, scale: Scale) -> Iterator[Row]:
    tokens = scale.pick(4, 64) * LENGTH
    same: dict[str, Any] = {"calibration_tokens": tokens, "eval_tokens": 2 * tokens, "sequence_length": LENGTH}
    same |= {"cache_dir": cache, "device": "cpu", "calibration_data": "stdlib"}
    same |= {"model": folder, "kv_ratio": 0.5}
    means: Any = Convert(ConvertOptions(recipe="gqa", **same)).run()
    for recipe, settings in (("least_squares", {}), ("headfold_gqa", scale.pick({"refinement.fit_steps": 2}, {}))):
        ours: Any = Convert(ConvertOptions(recipe=recipe, overrides=settings, **same)).run()
        increases = (
            f"loss {means['original_loss']:.2f}, {ours['loss_increase']:+z.3f} against {means['loss_increase']:+z.3f}"
        )
        yield Row(f"{name}, {recipe}", ours["kl"], means["kl"], "nats", increases)
