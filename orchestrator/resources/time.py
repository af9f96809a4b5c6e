"""Floating-point operations of a conversion, and the speed of this machine.

Legend: L layers, H query heads, d head dim, D model dim, e = D + 1, V vocabulary, C calibration
tokens, E held-out tokens, N = C + E, b bytes of a weight in computation (4 on the CPU), T tokens
per sequence, B sequences per batch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from attention.base.products import exact_products
from attention.calibration.collecting import BLOCK
from attention.conversion.fusion.estimates import LEADING
from attention.conversion.refinement.local import (
    FIT_TOKENS,
    SHORT_FIT_WINDOWS,
    STEP_TOKENS,
    sequences_a_step,
    steps_in_all,
)
from attention.conversion.refinement.windows import windows
from attention.io.precision import DTYPES
from orchestrator.resources.accelerators import training_operations
from orchestrator.resources.size import Conversion, Size, lifted_weights
from search_spaces.allocation.knapsack import considered
from search_spaces.grouping.exact import AFFORDABLE
from search_spaces.grouping.merge_anneal import PRICES
from search_spaces.grouping.subsets import EXACT_HEADS
from search_spaces.partitions import largest_group
from search_spaces.planning.budgets import problem_of
from search_spaces.planning.rank_counts import layer_counts
from trainers.jobs.utilization import TokenWork
from trainers.losses import objective
from trainers.recomputation import recompute
from trainers.settings import TrainSettings

MEASURABLE = 300_000_000  # parameters up to which a rate is measured here
FEW_TOKENS = 1024  # of the measured step
PRICE, FUSED = 30.0, 100.0
"""Operations, at the speed of a matrix product, of pricing and of fusing a group for each cubed row
of its Gram matrix: eigenvalues take longer than products.
"""
MULTIPLY_ADDS = 10.0  # of pricing, as `exact` counts them against what it can afford
WIDE = 1024  # rows of all value heads above which grouping goes by estimates
SEARCHED = 500.0  # operations of a search by estimates, for each squared head and cubed head dim
DOUBLE = 2.0  # a product in float64 against one in float32
FITTING = 2.5
"""Time of a step of a local fit relative to its matrix products: it includes attention weights,
their gradients and Adam, as measured at hidden sizes of 256 to 1,024 (`python -m benchmarks
estimates`).
"""
ATTENDING = 14.0
"""Operations of attention in a step of a fit on a window, forward and back, for each query, key and
dim.
"""
LOGITS, DRAWN = 5.5, 6.0
"""Products with the output matrix that measuring a token takes, and its share in the sensitivity of
the outputs, with the softmax over the vocabulary counted as such.
"""
TRAINED_LOGITS = 5.5
"""Products with the output matrix that training on a token takes: forward, again in the backward
pass, two gradients; and the softmax.
"""
START_SECONDS = 12.0  # libraries and texts


def operations(conversion: Conversion, size: Size, tokens: int) -> float:
    """Return the floating-point operations of a conversion layer by layer.

    Forward passes, statistics, grouping, fusion, refinement, held-out logits.
    """
    g, c = conversion.geometry, conversion
    forward = forward_operations(c, size)
    passes = forward * tokens
    features = c.features
    if c.recipe.objective == "least_squares":
        passes += grouping_operations(c)
    if "least_squares" in (c.recipe.fusion, c.recipe.alignment):
        passes += fusing_operations(c, g.num_kv_heads * c.kv_ratio / c.width)
    if "heal" in c.recipe.refinement:
        moments = 2.0 * c.used_tokens * features * (features + g.hidden_size)
        solved = 4.3 * features**3
        passes += c.used_tokens * 4.0 * (size.attention + c.added) + DOUBLE * (moments + solved)
    if c.recipe.refinement == "fit_heal":
        knobs = c.recipe.knobs("refinement")
        steps = steps_in_all(knobs["fit_steps"], g.num_layers) / g.num_layers
        passes += steps * step_operations(c, size, knobs["step_tokens"])
    predicted = LOGITS * c.eval_tokens + DRAWN * c.planned_on
    work = g.num_layers * passes + 2.0 * predicted * size.embedding
    return work + common_operations(c, size, tokens) + polish_operations(c, size, forward)


def forward_operations(conversion: Conversion, size: Size) -> float:
    """Return the operations of a token through one layer."""
    g = conversion.geometry
    return 2.0 * size.active + 2 * 2 * g.num_heads * g.head_dim * conversion.sequence_length


def common_operations(conversion: Conversion, size: Size, tokens: int) -> float:
    """Return what `operations` counts and conversions to several KV ratios share.

    The calibration, the loss increases of the layers, the original's pass.
    """
    g, c = conversion.geometry, conversion
    forward = forward_operations(c, size)
    passes = forward * tokens
    if c.planned_on:
        passes += c.planned_on * (4 * forward + 2.0 * g.hidden_size**2) + planning_operations(
            c, size, forward
        )
    return g.num_layers * passes + statistics_operations(c, size)


def statistics_operations(conversion: Conversion, size: Size) -> float:
    """Return the operations of a calibration; 0 for a recipe that needs none."""
    g, c = conversion.geometry, conversion
    if "statistics" not in c.recipe.needs:
        return 0.0
    forward = forward_operations(c, size)
    blocks = -(-c.sequence_length // BLOCK)  # of queries, each with the keys up to its end
    mixing = 2.0 * g.num_heads * (g.hidden_size + 1) * c.sequence_length * (blocks + 1)
    mixing /= 2 * blocks
    wide = (g.hidden_size + 1) ** 2
    of_token = forward + 2.0 * wide * (g.num_heads / 2 + 1) + mixing
    return g.num_layers * c.used_tokens * of_token


def polish_operations(conversion: Conversion, size: Size, forward: float) -> float:
    """Return the operations of the polish.

    Each token goes forward, forward again and backward, in which frozen weights have no gradients;
    each sequence goes once forward through the original.

    Args:
        forward: Of a token through one layer.
    """
    c = conversion
    tokens = c.polish_steps * c.polish_tokens
    through = c.geometry.num_layers * forward + 2.0 * LOGITS * size.embedding
    passes = 4 if c.polish_weights == "all" else 3
    return through * (passes * tokens + min(tokens, c.calibration_tokens))


def search_phase_operations(conversion: Conversion, size: Size) -> float:
    """Return the operations of DHA's search phase: steps of training with a KV head per query head.

    The products that mix the weights of heads are left out: once for all tokens of a micro-batch
    they take as many operations as one token does for each head.
    """
    c, g = conversion, conversion.geometry
    attending = 2 * 2 * g.num_heads * g.head_dim * c.sequence_length
    forward = 2.0 * (size.active + lifted_weights(g)) + attending
    passes = 3 * g.num_layers * forward + 2.0 * TRAINED_LOGITS * size.embedding
    return passes * c.search_phase_tokens


def grouping_operations(conversion: Conversion) -> float:
    """Operations of grouping one layer: Gram matrices, then the prices of groups.

    A KV head counts once, however many query heads share it.
    """
    g = conversion.geometry
    units = g.num_kv_heads
    dim = g.head_dim
    width = g.hidden_size
    rows = units * dim
    keys = 2.0 * (g.num_heads * dim + rows) * width**2
    pooled = 2.0 * rows * width * (width / 2 + rows)
    leading = 2.0 * g.num_heads * LEADING * width * (width / 2 + LEADING) + 12.0 * rows**2 * LEADING
    estimated = pooled + leading + SEARCHED * units**2 * dim**3
    if rows > WIDE and units > EXACT_HEADS:  # by estimates of the cost
        return keys + estimated
    prepared = 2.0 * g.num_heads * rows * width * (width / 2 + rows)
    if units > EXACT_HEADS:
        return keys + prepared + PRICES * PRICE * (4 * dim) ** 3
    priced: set[int] = set()
    searched = 0.0
    equal = conversion.recipe.equal_groups
    for count in layer_counts(conversion.recipe, conversion.kv_ratio, g):
        groups = min(units, count * conversion.width)
        largest = largest_group(units, groups, equal)
        sizes = [largest] if equal and units % groups == 0 else range(2, largest + 1)
        effort = MULTIPLY_ADDS * sum(math.comb(units, s) * (s * dim) ** 3 for s in sizes)
        if effort <= AFFORDABLE:
            priced |= {*sizes}
        else:
            searched = estimated if rows > WIDE else PRICES * PRICE * (4 * dim) ** 3
    prices = PRICE * sum(math.comb(units, size) * (size * dim) ** 3 for size in priced)
    return keys + prepared + prices + searched


def fusing_operations(conversion: Conversion, groups: float) -> float:
    """Return the operations of least-squares fusion of a layer into `groups` heads, in float64."""
    g, groups = conversion.geometry, max(1.0, groups)
    units = g.num_kv_heads
    dim = g.head_dim
    width = g.hidden_size
    rows = units * dim / groups
    keys = 2.0 * (g.num_heads + units) * dim * width**2
    values = 2.0 * g.num_heads * rows * width * (width / 2 + rows)
    return DOUBLE * (keys + values) + FUSED * groups * rows**3


def step_operations(
    conversion: Conversion, size: Size, step_tokens: int = STEP_TOKENS, first: int | None = None
) -> float:
    """Return the operations of a step of a local fit.

    A step takes whole sequences, or a window of one with all keys before it.

    Args:
        first: Count this many windows of the sequence, its first ones; None for all.
    """
    g, length = conversion.geometry, conversion.sequence_length
    count = len(windows(length, step_tokens))
    parts = windows(length, step_tokens)[:first]
    tokens = sequences_a_step(length, step_tokens) * length / count
    seen = sum(end for _, end in parts) / len(parts)  # keys, on average
    stored = 2.0 * g.num_kv_heads * g.head_dim * g.hidden_size
    queries = conversion.features
    before = (6.0 * stored + 2.0 * queries * g.hidden_size) * (seen - length / count)
    attending = ATTENDING * queries * tokens * seen if count > 1 else 0.0
    attention = size.attention + conversion.added
    return FITTING * tokens * 6.0 * attention + before * (count > 1) + attending


def planning_operations(conversion: Conversion, size: Size, forward: float) -> float:
    """Return the operations of one layer's loss increases, and of its second calibration."""
    c, knobs = conversion, conversion.recipe.knobs("allocation")
    problem = problem_of(c.recipe, c.kv_ratio, c.geometry)
    counts = [count for count in considered(problem, knobs["counts"]) if count < problem.stored]
    fused = sum(fusing_operations(c, count / c.width) for count in counts)
    steps = min(knobs["fit_steps"], c.recipe.knobs("refinement").get("fit_steps", 0))
    checked = min(c.used_tokens, FIT_TOKENS) / 8
    judged = 2.0 * checked * (2 * (size.attention + c.added) + c.geometry.hidden_size**2)
    sides = 1 if c.recipe.together else 2
    return (
        len(counts) * sides * (steps * step_operations(c, size, first=SHORT_FIT_WINDOWS) + judged)
        + fused
        + c.used_tokens * forward
    )


@cache
def matmul_rate(dtype: torch.dtype, size: int = 1024) -> float:
    """Return the operations per second of a matrix product in `dtype` here, measured once.

    It is the fastest of ten, as others may be interrupted.
    """
    a = torch.ones(size, size, dtype=dtype)
    seconds: list[float] = []
    for _ in range(10):
        started = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - started)
    return 2.0 * size**3 / max(min(seconds), 1e-9)


def planning_seconds(
    conversions: Sequence[Conversion],
    size: Size,
    drawn: int,
    rate: float | None = None,
    seeds: int = 1,
) -> float:
    """Return the seconds of planning and converting the candidates, and `drawn` more like them.

    One conversion is made for all learning rates, and one calibration for all conversions.

    Args:
        rate: Operations per second; by default those of a matrix product here.
        seeds: Of the candidates, each of which may lead to another plan.
    """
    rate = rate or matmul_rate(conversions[0].working)
    different = list(
        {
            json.dumps([each.recipe.conversion_choices, each.kv_ratio]): each
            for each in conversions
        }.values()
    )
    calibrated = [statistics_operations(conversion, size) for conversion in different]
    work = sum(operations(conversion, size, 0) for conversion in different) - sum(calibrated)
    return (work * (seeds + drawn / len(different)) + max(calibrated)) / rate


def gpu_here() -> str | None:
    """Return the type of this machine's first GPU, if it has one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def training_rate(
    model_config: PretrainedConfig,
    train: TrainSettings,
    length: int,
    size: Size,
    configured: float | None = None,
    gpu: str | None = None,
) -> tuple[float | None, str]:
    """Return the tokens per second of one worker, in sequences of `length`, and their source.

    Args:
        configured: What the configuration says.
        gpu: Type of the workers' GPU, where it is not the one here.
    """
    if configured is not None:
        return configured, "configured"
    wants_gpu = train.shape.device == "cuda"
    if wants_gpu and gpu is None and size.total > MEASURABLE:
        gpu = gpu_here()
    if wants_gpu and gpu and (speed := training_operations(gpu)):
        source = f"estimated for {gpu} by the utilization of an H200 (docs/gpu.md)"
        return speed / token_operations(model_config, train, length), source
    if wants_gpu and gpu_here() is None:
        return (
            None,
            "unknown: workers have GPUs and this machine has none; name their type "
            "(resources.accelerator_type), or set resources.tokens_per_second",
        )
    if size.total > MEASURABLE:
        return (
            None,
            "unknown: too large a model to be measured in passing; set resources.tokens_per_second",
        )
    return measured_rate(model_config, train, length), "measured here"


def token_operations(model_config: PretrainedConfig, train: TrainSettings, length: int) -> float:
    """Return the operations of training on one token, with its teacher and what is recomputed."""
    from transformers import AutoModelForCausalLM

    classes: Any = AutoModelForCausalLM
    with torch.device("meta"), no_init_weights():
        model: Any = classes.from_config(model_config)
    model.requires_grad_(train.tuning == "full")
    teacher = None if train.distillation == "none" or train.keeps_teacher_logits else model
    recomputed = train.activation_checkpointing is True
    return TokenWork.of(model, length, recomputed=recomputed, teacher=teacher).hardware


def measured_rate(model_config: PretrainedConfig, train: TrainSettings, length: int) -> float:
    """Return the tokens per second of a training step on random weights, distillation included.

    The second of two steps counts.
    """
    from transformers import AutoModelForCausalLM

    device = torch.device(train.shape.device)
    dtype = DTYPES[train.dtype]
    classes: Any = AutoModelForCausalLM
    model: Any = classes.from_config(model_config, dtype=dtype).to(device)
    recompute(model.train(), train)
    rows = max(1, min(train.device_batch_size, FEW_TOKENS // length))
    batch = torch.zeros(rows, length, dtype=torch.long, device=device)
    before = torch.get_num_threads()
    torch.set_num_threads(train.threads)
    loss_fn = objective(train.distillation, train.distillation_weight, model)
    seconds = 0.0
    try:
        for _ in range(2):
            started = time.perf_counter()
            with exact_products():
                torch.autograd.backward(loss_fn(model, batch))
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
    finally:
        torch.set_num_threads(before)
    return rows * length / seconds
