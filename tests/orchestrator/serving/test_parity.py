"""Exports computed by the engines themselves: the source's tokens and log-probabilities, in the promised bytes.

llama.cpp and transformers are part of `make test`; vLLM needs a separate environment (`make engines`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_plans import converted, plans, together
from parameters import extended
from transformers import PreTrainedModel
from verbs import export_checkpoint

from attention.calibration.calibrate import calibrate
from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.io.targets import target as target_of
from attention.plan import AttentionPlan, LayerPlan
from orchestrator.serving.vllm import VARIABLE

Tiny = Callable[..., PreTrainedModel]
HEAD_DIM = 32  # vLLM's kernels for the CPU have no smaller one
WIDE = AttentionPlan((LayerPlan((0,) * 4, (0,) * 4, 2, 2),) * 2, HEAD_DIM)
"""One head of 64 numbers instead of four of 32."""
PLANS = plans(HEAD_DIM) | {"even": AttentionPlan(together((0, 1, 1, 0), (0, 0, 0, 0)), HEAD_DIM), "wide": WIDE}
DERIVED = ("gpt_neox", "phi", "phi3", "stablelm")  # their head dim is the width over the heads
VLLM = os.environ.get(VARIABLE)
SCALED = {
    "llama-3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 16, "rope_theta": 10000.0},
    "llama-linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
}
"""Llamas whose rotary embedding is scaled, from before the end of a prompt on."""


@pytest.fixture(scope="session")
def source(tiny_model: Tiny, demo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`source(family, kind)`: a checkpoint with the demo's tokenizer and a plan of that kind."""

    def save(family: str, kind: str) -> Path:
        settings: dict[str, Any] = {"vocab_size": 2064, "hidden_size": 4 * HEAD_DIM, "max_position_embeddings": 128}
        settings |= {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": family == "qwen3"}
        settings |= {} if family in DERIVED else {"head_dim": HEAD_DIM}
        settings |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} if family == "phi3" else {}
        if family == "glm-4.5-air":  # which has no norm on queries and keys
            family, settings = "glm4_moe", settings | {"use_qk_norm": False}
        if family in SCALED:
            family, settings = "llama", settings | {"rope_parameters": SCALED[family]}
        model = tiny_model(family, **settings)
        if kind == "wide":
            tokens = torch.randint(2048, (4, 64), generator=torch.Generator().manual_seed(0))
            model = convert(model, WIDE, fusion="least_squares", calibration=calibrate(model, tokens))
        else:
            model = converted(model, PLANS[kind])
        return checkpoint.save(model, tmp_path_factory.mktemp("source") / kind, demo_dir)

    return save


CASES = [
    ("llama", "gguf", "uniform", "llama"),
    ("llama", "gguf", "layers", "deci"),
    ("llama", "gguf", "unequal", "llama"),
    ("llama", "gguf", "apart", "deci"),
    ("llama", "gguf", "wide", "llama"),
    ("llama-3", "gguf", "uniform", "llama"),
    ("llama-linear", "gguf", "layers", "deci"),
    ("qwen2", "gguf", "unequal", "deci"),
    extended("qwen2", "gguf", "uniform", "qwen2"),
    extended("qwen2", "gguf", "wide", "deci"),
    ("qwen3", "gguf", "uniform", "qwen3"),
    ("qwen3", "gguf", "layers", "openelm"),
    ("qwen3", "gguf", "unequal", "qwen3"),
    ("qwen3", "gguf", "apart", "openelm"),
    ("gpt_neox", "gguf", "uniform", "phi2"),
    ("mixtral", "gguf", "unequal", "llama"),
    ("qwen3_moe", "gguf", "uniform", "qwen3moe"),
    extended("llama", "transformers", "layers", "head_maps_llama"),
    ("llama", "transformers", "apart", "head_maps_llama"),
    extended("qwen3", "transformers", "apart", "head_maps_qwen3"),
    extended("qwen3", "transformers", "composed", "composed_heads_qwen3"),
    extended("gpt_neox", "transformers", "apart", "head_maps_phi"),
    ("qwen3", "per_layer", "layers", "qwen3"),
    extended("qwen3_moe", "per_layer", "layers", "qwen3_moe"),
    extended("glm4_moe", "per_layer", "layers", "glm4_moe"),
    extended("minimax_m2", "per_layer", "even", "minimax_m2"),
    ("llama", "gqa", "unequal", "mistral"),
    extended("llama", "gqa", "wide", "llama"),
    extended("glm4_moe", "gqa", "unequal", "glm4_moe"),
    extended("minimax_m2", "gqa", "uniform", "minimax_m2"),
    extended("qwen3", "gqa", "apart", "qwen3"),
    extended("gpt_neox", "phi", "layers", "phi"),
]  # fmt: skip
IN_VLLM = [
    ("llama", "vllm", "uniform", "llama"),
    ("llama", "vllm", "layers", "nemotron-nas"),
    ("llama", "vllm", "unequal", "mistral"),
    ("llama", "vllm", "apart", "nemotron-nas"),
    ("llama", "vllm", "wide", "llama"),
    ("llama-3", "vllm", "wide", "llama"),
    ("qwen2", "vllm", "uniform", "qwen2"),
    ("qwen2", "vllm", "layers", "nemotron-nas"),
    ("qwen2", "vllm", "unequal", "nemotron-nas"),
    ("qwen2", "vllm", "wide", "nemotron-nas"),
    ("qwen3", "vllm", "uniform", "qwen3"),
    ("qwen3", "vllm", "layers", "qwen3"),
    ("qwen3", "vllm", "unequal", "qwen3"),
    ("qwen3", "vllm", "apart", "qwen3"),
    ("llama", "per_layer", "layers", "mistral"),
    ("qwen3", "per_layer", "layers", "qwen3"),
    ("qwen3_moe", "per_layer", "layers", "qwen3_moe"),
    *(
        (family, "per_layer", "even", family)
        for family in ("gemma", "granite", "mixtral", "olmo2", "olmoe", "phi", "phi3", "smollm3", "stablelm")
    ),
    ("gpt_neox", "vllm", "uniform", "phi"),
    ("gpt_neox", "vllm", "apart", "phi"),
    ("glm4_moe", "vllm", "uniform", "glm4_moe"),
    ("glm4_moe", "per_layer", "layers", "glm4_moe"),
    ("glm-4.5-air", "vllm", "uniform", "glm4_moe"),
    ("glm-4.5-air", "per_layer", "layers", "glm4_moe"),
]
"""Without MiniMax-M2: on a CPU vLLM 0.32 routes to experts by softmax alone, and MiniMax-M2 does so by sigmoid."""


def _check(family: str, target: str, kind: str, form: str, folder: Path, out: Path, engine: str | None = None) -> None:
    record = export_checkpoint(folder, target, out, check=True, engine=engine, allow_larger_cache=True)
    result = record["check"]
    assert record["model_type"] == form and record["exact"] and result["passed"]
    if kind == "wide":  # the source is a stock folder already
        promised = WIDE.kv_bytes_per_token("float32")
    else:
        support = target_of(target).support_for(checkpoint.load_config(folder), PLANS[kind])
        promised = support.bytes_per_token("float32")
    assert result["kv_bytes_per_token"] == result["kv_bytes_per_token_promised"] == promised
    assert result["capacity"] == pytest.approx(2**30 / promised, rel=2e-3)
    exact = result["runs"][0]
    assert exact["prompts"] == exact["same"] == 8 and exact["tokens"] > 8 * 24
    gelu = 10 if family == "gpt_neox" and target == "gguf" else 1  # llama.cpp looks GELU up in 16 bits
    assert exact["difference"] < 1e-3 * gelu


@pytest.mark.slow
@pytest.mark.parametrize(("family", "target", "kind", "form"), CASES)
def test_an_engine_computes_what_the_source_does(
    family: str, target: str, kind: str, form: str, source: Callable[[str, str], Path], tmp_path: Path
) -> None:
    _check(family, target, kind, form, source(family, kind), tmp_path / "out")


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.skipif(VLLM is None, reason=f"vLLM needs an environment of its own: `make engines`, or {VARIABLE}=PYTHON")
@pytest.mark.parametrize(("family", "target", "kind", "form"), IN_VLLM)
def test_vllm_computes_what_the_source_does(
    family: str, target: str, kind: str, form: str, source: Callable[[str, str], Path], tmp_path: Path
) -> None:
    _check(family, target, kind, form, source(family, kind), tmp_path / "out", "vLLM")
