"""Our losses with a cache of an engine's formats against those of the engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from attention.cache_formats import AS_WEIGHTS, LLAMA_CPP, CachePair
from attention.calibration.calibrate import calibrate
from attention.conversion.convert import convert
from attention.engine_cache import engine_cache, with_engine_heads
from attention.io import checkpoint
from attention.io.export import export
from attention.io.targets import EngineSupport
from attention.modeling import rounded_cache
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan, LayerPlan
from orchestrator.serving import vllm
from orchestrator.serving.engine import ScoreQuestion
from orchestrator.serving.llama_cpp import score
from trainers.evaluation import evaluate

# Root mean square of the differences of log-probabilities that float arithmetic causes: a number on the edge of a step
# of 4 bits falls to either side. Another format, basis or order of dims is ten times as far off.
CLOSE = 0.05
TOKENS = 96


def _export(model: PreTrainedModel, folder: Path, demo_dir: Path) -> Path:
    checkpoint.save(model, folder / "source", demo_dir)
    export(folder / "source", "gguf", folder / "gguf", folder / "source", dtype="float32")
    return folder / "gguf" / "model.gguf"


def _check(model: PreTrainedModel, file: Path, ids: torch.Tensor, names: list[str]) -> None:
    plan = plan_of(model)
    ours = {}
    for name in {*names, "f16", "q8_0", "q4_0"}:
        with engine_cache(model, CachePair.parse(name)):
            ours[name] = evaluate(model, ids).token_losses
    for name in names:
        pair = CachePair.parse(name)
        assert LLAMA_CPP in pair.engines
        support = EngineSupport.of([layer.key_heads for layer in plan.layers], plan.head_dim)
        question = ScoreQuestion(file.parent, ids.tolist(), "float32", support, pair, seconds=300)
        scored = score(sys.executable, question)
        theirs = -torch.tensor([[x if x is not None else float("nan") for x in row] for row in scored[0]])
        read = ~theirs.isnan()
        assert read.sum() >= 0.9 * read.numel()
        apart = {other: float((ours[other] - theirs)[read].square().mean().sqrt()) for other in ours}
        assert apart[name] < CLOSE, f"{name}: {apart}"
        assert all(value > 2 * apart[name] for other, value in apart.items() if other != name), f"{name}: {apart}"
        assert scored.kv_bytes_per_token == pair.bytes_per_token(plan)


def _text(demo_tokenizer: object) -> torch.Tensor:
    source = Path(__file__).parents[3] / "orchestrator" / "checkpoints.py"
    ids = demo_tokenizer(source.read_text(encoding="utf-8"))["input_ids"]  # type: ignore[operator]
    return torch.tensor([ids[:TOKENS], ids[TOKENS : 2 * TOKENS]])


def test_losses_are_those_of_llama_cpp(
    demo_model: PreTrainedModel, demo_dir: Path, demo_tokenizer: object, tmp_path: Path
) -> None:
    """A model of uneven groups, whose heads of 32 are rounded unchanged."""
    layer = LayerPlan((0, 0, 0, 1, 1, 2, 2, 2), (0, 0, 0, 1, 1, 2, 2, 2))
    model = convert(demo_model, AttentionPlan((layer, *[LayerPlan.identity(8)] * 3), 32))
    _check(model, _export(model, tmp_path, demo_dir), _text(demo_tokenizer)[:1], ["q8_0,q4_0"])


def test_losses_of_wide_heads_are_those_of_llama_cpp(
    demo_model: PreTrainedModel, demo_dir: Path, demo_tokenizer: object, tmp_path: Path
) -> None:
    """One head of 64 instead of eight of 32: rounded as one head, and turned, since it has 64 numbers."""
    layer = LayerPlan((0,) * 8, (0,) * 8, 2, 2)
    text = _text(demo_tokenizer)
    model = convert(
        demo_model,
        AttentionPlan((layer,) * 4, 32),
        fusion="least_squares",
        calibration=calibrate(demo_model, text),
    )
    _check(with_engine_heads(model), _export(model, tmp_path, demo_dir), text[:1], ["q8_0,q4_0"])


@pytest.mark.extended
def test_losses_of_heads_of_64_are_those_of_llama_cpp(demo_dir: Path, demo_tokenizer: object, tmp_path: Path) -> None:
    """Which llama.cpp turns by a Hadamard transform; its keys have neighbours for rotary halves."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    file = _export(model, tmp_path, demo_dir)
    _check(model, file, _text(demo_tokenizer), ["f16", "q8_0", "q5_1", "q4_0", "q8_0,q4_0"])


def _toward_zero(x: torch.Tensor, scale: float) -> torch.Tensor:
    """As vLLM 0.32 rounds to e4m3 on x86 CPUs (`csrc/cpu/cpu_attn_fp8.hpp`): it drops further bits of the mantissa."""
    exact = (x / scale).clamp(-448, 448)
    near = exact.to(torch.float8_e4m3fn)
    code = near.view(torch.uint8) - (near.float().abs() > exact.abs()).to(torch.uint8)
    return code.view(torch.float8_e4m3fn).float() * scale


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.skipif(vllm.VARIABLE not in os.environ, reason=f"vLLM: `make engines`, or {vllm.VARIABLE}=PYTHON")
def test_losses_are_those_of_vllm(
    demo_model: PreTrainedModel,
    demo_dir: Path,
    demo_tokenizer: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its fp8 on a CPU is ours but for the rounding of a number, which GPUs do to the nearest."""
    text = _text(demo_tokenizer)
    export(demo_dir, "vllm", tmp_path / "vllm", demo_dir, dtype="float32")
    fp8, ours = CachePair.parse("fp8"), {"auto": evaluate(demo_model, text).token_losses}
    for name in ("nearest", "fp8"):
        with engine_cache(demo_model, fp8):
            ours[name] = evaluate(demo_model, text).token_losses
        monkeypatch.setattr(rounded_cache, "_round_fp8", _toward_zero)
    for pair, size in ((AS_WEIGHTS, 8192), (fp8, 2048)):
        question = ScoreQuestion(
            tmp_path / "vllm", text.tolist(), "float32", EngineSupport.of([8] * 4, 32), pair, seconds=600
        )
        scored = vllm.score(vllm.find(None), question)
        assert (scored.device, scored.kv_bytes_per_token) == ("cpu", size)
        theirs = -torch.tensor(scored.log_probabilities)
        apart = {name: float((losses - theirs).square().mean().sqrt()) for name, losses in ours.items()}
        assert apart.pop(pair.name) < 5e-3 < min(apart.values()), apart
