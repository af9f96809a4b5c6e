"""First configurations of public models, configs/recipes/<model type>/<model>.yaml, from their shapes alone;
`python docs/reference.py` writes them.

Each is what `headfold init` writes for one H100, with the recipe that `auto` takes and what a conversion to half of the
KV cache is estimated to take above it, or what it was measured to lose where benchmarks/real has measured it.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from attention.base.timing import duration
from attention.families import geometry_of
from attention.io.precision import DTYPES
from orchestrator.config.first import FirstConfig, Hardware
from orchestrator.config.options import ConvertOptions
from orchestrator.conversion.short_fits import competing_recipes, equal_budgets
from orchestrator.resources.accelerators import conversion_rate, memory_of
from orchestrator.resources.size import Conversion, Size
from orchestrator.resources.time import START_SECONDS, operations
from search_spaces.recipes.catalogue import RECIPES
from search_spaces.recipes.choice import ENGINE_NAMES, choose_recipe, limited_geometry

FOLDER = "../configs/recipes"
GPU = "H100"
RATIO = 0.5
TOKENS, LENGTH = 16_384, 2048
"""Those of `headfold convert` where nothing else is said."""
MEASURED = Path(__file__).resolve().parents[1] / "benchmarks" / "real" / "records.json"
LLAMA_3: dict[str, Any] = {
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
EIGHT: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8}
SHAPES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        LlamaConfig,
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
        | {
            "num_key_value_heads": 3,
            "vocab_size": 49_152,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "meta-llama/Llama-3.2-1B-Instruct": (
        LlamaConfig,
        {**LLAMA_3, **EIGHT, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"head_dim": 64, "tie_word_embeddings": True},
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        LlamaConfig,
        {**LLAMA_3, **EIGHT, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
        | {"tie_word_embeddings": False},
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        MistralConfig,
        {**EIGHT, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "vocab_size": 32_768}
        | {"max_position_embeddings": 32_768, "sliding_window": None, "tie_word_embeddings": False},
    ),
    "Qwen/Qwen2.5-7B-Instruct": (
        Qwen2Config,
        {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28}
        | {"num_key_value_heads": 4, "vocab_size": 152_064, "max_position_embeddings": 32_768}
        | {"tie_word_embeddings": False},
    ),
    "Qwen/Qwen3-0.6B": (
        Qwen3Config,
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
        | {"tie_word_embeddings": True},
    ),
    "Qwen/Qwen3-8B": (
        Qwen3Config,
        {**EIGHT, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "head_dim": 128}
        | {"vocab_size": 151_936, "max_position_embeddings": 40_960, "tie_word_embeddings": False},
    ),
}
"""As the models' own config.json files have them."""


def model_configs() -> dict[str, str]:
    """Content of each file by its path from docs/."""
    files = {}
    for model, (kind, fields) in SHAPES.items():
        config = kind(**{"pad_token_id": None, **fields})
        first = FirstConfig(
            model=model,
            geometry=geometry_of(config),
            dtype="bfloat16",
            parameters=Size.of(config).total,
            source="builtin",
            hardware=Hardware(gpus=1, gpu_bytes=memory_of(GPU) or 0, cpus=16),
            schema="../../../docs/config.schema.json",
            small=True,
        )
        head, rest = first.text().split("\n", 1)
        notes = "\n".join(f"# {line}" for line in _notes(model, config))
        files[f"{FOLDER}/{config.model_type}/{first.name}.yaml"] = f"{head}\n{notes}\n#\n{rest}"
    return files


def _notes(model: str, config: PretrainedConfig) -> list[str]:
    """Describe the resources of `headfold convert` for the model."""
    geometry = geometry_of(config)
    choice = choose_recipe(config, geometry)
    engines = ", ".join(ENGINE_NAMES[engine] for engine in choice.engines)
    shape: Any = SimpleNamespace(config=config, geometry=geometry)  # of a checkpoint
    competing = competing_recipes(shape, RECIPES[choice.recipe], ConvertOptions(model=model, kv_ratio=RATIO))
    forms = [choice.forms[engine] for engine in choice.engines]
    limited = limited_geometry(RECIPES[choice.recipe], geometry, forms)
    names = [recipe.name for recipe in equal_budgets(competing, RATIO, limited)]
    takes = f"takes the recipe {names[0]}" if len(names) == 1 else f"takes {' or '.join(names)}, by short fits of both"
    lines = [
        f"headfold convert --model {model} --kv-ratio {RATIO} {takes}: {choice.reason}.",
        f"Engines that load the result: {engines}.",
    ]
    measured = _measured(choice.recipe) if model.endswith("SmolLM2-135M-Instruct") else []
    return lines + (measured or _estimated(config, choice.recipe))


def _measured(recipe: str) -> list[str]:
    """The loss increases of a recipe that `make real` has recorded."""
    parts = json.loads(MEASURED.read_text(encoding="utf-8"))["parts"]
    rows = parts.get(recipe, {"rows": []})["rows"]
    losses = ", ".join(f"{row['increase']} at {row['KV cache']}" for row in rows)
    where = "nats per token on 8,192 tokens of the built-in text, no training (docs/real.md)"
    return [f"Measured loss increase: {losses};", where] if rows else []


def _estimated(config: PretrainedConfig, recipe: str) -> list[str]:
    """The time of a conversion on one GPU, estimated."""
    dtype = DTYPES["bfloat16"]
    conversion = Conversion(config, RECIPES[recipe], RATIO, TOKENS, TOKENS, LENGTH, dtype, dtype)
    rate = conversion_rate(GPU)
    assert rate is not None
    seconds = START_SECONDS + operations(conversion, Size.of(config), 2 * TOKENS) / rate
    return [
        f"Estimated, not measured: about {duration(seconds)} on one {GPU} for {recipe}",
        f"(headfold estimate --gpu {GPU});",
        "what it loses has not been measured for this model.",
    ]
