"""One decoder layer of today's models at its real width, converted layer by layer, planned and exported.

    python -m benchmarks real-width [--quick]

Weights are random and the vocabulary is the demo tokenizer's; seconds and memory of a layer are measured and compared
with `estimate`. The local fit makes two steps instead of 480: its share of the time must be multiplied.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import GptOssConfig, LlamaConfig, Olmo2Config, PretrainedConfig, Qwen3Config

from benchmarks.needs.memory import GIGA, measured, verbs
from benchmarks.report import Row, Scale, benchmark

COMMON: dict[str, Any] = {
    "num_hidden_layers": 1,
    "vocab_size": 2048,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": False,
}
COMMON |= {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
NARROW: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
EIGHT: dict[str, Any] = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SHAPES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "Llama-3-8B": (LlamaConfig, {**EIGHT, "intermediate_size": 14_336, "rope_parameters": LLAMA3}),
    "Qwen3-8B": (Qwen3Config, {**EIGHT, "intermediate_size": 12_288}),
    "OLMo-2-7B": (
        Olmo2Config,
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11_008},
    ),
    "gpt-oss-20b": (
        GptOssConfig,
        {"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
        | {"intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4},
    ),
}


@benchmark("real-width", devices=())
def real_width(scale: Scale) -> Iterator[Row]:
    """Seconds and memory of a layer of Llama-3-8B, Qwen3-8B, OLMo-2-7B and gpt-oss-20b, against estimate."""
    length = scale.pick(32, 256)
    sizes = ["--calibration-tokens", str(8 * length), "--eval-tokens", str(2 * length)]
    sizes += ["--sequence-length", str(length), "--set", "refinement.fit_steps=2"]
    for name, (kind, shape) in SHAPES.items():
        config = kind(**(COMMON | shape | (NARROW if scale.quick else {})))
        for recipe, more in {"headfold_gqa": [], "headfold": ["--set", "allocation.fit_steps=2"]}.items():
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder)
                estimate, done = measured(config, place, *sizes, *more, recipe=recipe)
                exported = "Headfold's own format"
                if recipe == "headfold_gqa":
                    verbs(["export", str(place / "out"), "--target", "gqa", "--out", str(place / "shipped")])
                    shipped = json.loads((place / "shipped" / "config.json").read_text(encoding="utf-8"))
                    exported = f"exported as {shipped['architectures'][0]}"
            about = f"{estimate['parameters'] / 1e9:.2f}B parameters, {exported}"
            peaks = done["peak_memory"] / GIGA, estimate["layerwise"] / GIGA
            yield Row(f"{name}, {recipe}: peak, estimated", *peaks, "GiB", about)
            spent = {phase: seconds for phase, seconds in done["seconds"].items() if seconds >= 0.1}
            phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in spent.items())
            yield Row(f"{name}, {recipe}: time, estimated", sum(spent.values()), estimate["seconds"], "s", phases)
