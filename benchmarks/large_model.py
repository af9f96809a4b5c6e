"""A model of the shape of Llama-2-7B with random weights: calibrated, converted to a quarter of its cache, decoding.

Measures an accelerator: seconds, peak memory, and milliseconds per token at 4k and 32k tokens of context. On a CPU only
the smallest size runs, to see that it works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from attention.calibration.calibrate import calibrate
from attention.conversion.convert import convert
from attention.plan import LayerPlan
from benchmarks.decode import RIVALS, stepper
from benchmarks.models import DEMO, LLAMA_7B, decoupled_plan, llama, random_model, tokens
from benchmarks.report import Row, Scale, benchmark, medians

T = TypeVar("T")


@benchmark("large-model", devices=("cuda",))
def large_model(scale: Scale) -> Iterator[Row]:
    """Llama-2-7B's shape, random weights: calibration, conversion to a quarter of the KV heads, decoding."""
    shape, layers = scale.pick((DEMO, 1), (LLAMA_7B, 32))
    dtype = torch.bfloat16 if scale.device == "cuda" else torch.float32
    heads, width = shape["num_attention_heads"], shape["head_dim"]
    config = llama(layers, shape, tie_word_embeddings=False)
    model = random_model(config, dtype, scale.device)
    plan = decoupled_plan(layers, heads, width)
    sequences = tokens(*scale.pick((2, 16), (16, 1024)), shape["vocab_size"])
    note = f"{sequences.numel()} tokens"
    statistics, seconds, peak = _measured(
        # One moment per head of all layers: 69 GB of host memory while they are summed.
        lambda: calibrate(model, sequences, sample_tokens=0, batch_size=2),
        scale.device,
    )
    yield Row("calibration", seconds, None, "s", f"{note}; {peak}")
    converted, seconds, peak = _measured(
        lambda: convert(model, plan, fusion="least_squares", calibration=statistics).eval(), scale.device
    )
    yield Row("conversion, least squares", seconds, None, "s", f"statistics given; {peak}")
    with torch.no_grad():
        grouped = random_model(
            llama(layers, shape, kv_heads=heads // 4, tie_word_embeddings=False), dtype, scale.device
        )
        fours = tuple(h // 4 for h in range(heads))
        uniform = LayerPlan(fours, fours)
        models = {
            "ours": (converted, plan.layers),
            "expand": (converted, plan.layers),
            "mha": (model, (LayerPlan.identity(heads),) * layers),
            "gqa": (grouped, (uniform,) * layers),
        }
        for length in scale.pick((32,), (4096, 32_768)):
            arms = {arm: stepper(arm_model, cache, length, arm) for arm, (arm_model, cache) in models.items()}
            times = medians(arms, scale.pick(1, 5), scale.device, dict.fromkeys(arms, scale.pick(1, 8)))
            for rival, words in RIVALS.items():
                yield Row(f"{length} tokens, {words}", 1e3 * times["ours"], 1e3 * times[rival], "ms per token")


def _measured(work: Callable[[], T], device: str) -> tuple[T, float, str]:
    """Return the result of `work`, its seconds, and the device's peak memory in words."""
    if device != "cuda":
        started = time.perf_counter()
        return work(), time.perf_counter() - started, "no device"
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    done = work()
    torch.cuda.synchronize()
    return done, time.perf_counter() - started, f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GB on the device"
