"""The floating-point operations of a conversion, and how fast this machine is.

Legend: L layers, H query heads, d head dim, D model dim, e = D + 1, V vocabulary, C calibration tokens, E held-out
tokens, N = C + E, b bytes of a weight that is worked on (4 on the CPU), T tokens a sequence, B sequences a batch.
"""

from __future__ import annotations

import time

import torch

from attention.conversion.refinement.local import FIT_TOKENS
from orchestrator.conversion import loading
from orchestrator.conversion.estimates.sizes import CPU, Conversion, Size
from search_spaces.allocation.knapsack import considered
from search_spaces.planning.budgets import problem_of
from search_spaces.planning.context import PLANNING_BATCH

GROUPING, FUSING = 100.0, 270.0
"""Operations of grouping and of least-squares fusion for each cubed row of the matrices that they solve, at the speed
of a matrix product: as measured on a layer of Llama-3-8B's shape (`benchmarks/LOG.md`)."""
FITTING = 2.0
"""A step of a local fit against its matrix products: attention weights, their gradients and Adam besides, as measured
at hidden sizes of 256 to 1,024 (`python -m benchmarks estimates`)."""
START_SECONDS = 10.0  # libraries and texts


def operations(conversion: Conversion, size: Size, tokens: int) -> float:
    """Floating-point operations of a conversion layer by layer: forward passes, statistics, grouping, fusion,
    refinement, held-out logits."""
    g, c = conversion.geometry, conversion
    forward = 2.0 * size.layer + 2 * 2 * g.num_heads * g.head_dim * c.sequence_length
    passes = 2 * forward * tokens
    wide = (g.hidden_size + 1) ** 2
    if "statistics" in c.recipe.needs:
        mixing = 2.0 * g.num_heads * (g.hidden_size + 1) * c.sequence_length
        passes += c.used_tokens * (forward + 2.0 * wide * (g.num_heads + 1) + mixing)
        passes += 2.0 * g.num_heads**2 * g.head_dim * (g.hidden_size * g.hidden_size + g.hidden_size * g.head_dim)
    if c.planned_on:
        passes += c.planned_on * (4 * forward + 2.0 * g.hidden_size**2) + planning_operations(c, size, forward)
    features = g.num_heads * g.head_dim
    if c.recipe.objective == "least_squares":  # whose prices are eigenvalues
        passes += GROUPING * features**3
    if "least_squares" in (c.recipe.fusion, c.recipe.alignment):
        groups = max(1.0, g.num_kv_heads * c.kv_ratio)
        passes += FUSING * 2 * groups * (features / groups) ** 3
    if "heal" in c.recipe.refinement:
        passes += c.used_tokens * (4.0 * size.attention + 2.0 * features * (features + g.hidden_size)) + features**3
    if c.recipe.refinement == "fit_heal":
        knobs = c.recipe.knobs("refinement")
        passes += FITTING * knobs["fit_steps"] * knobs["fit_batch"] * c.sequence_length * 6.0 * size.attention
    return g.num_layers * passes + 2 * 2.0 * c.eval_tokens * size.embedding


def planning_operations(conversion: Conversion, size: Size, forward: float) -> float:
    """Operations of the loss increases of one layer, keys and values, and of its second calibration layer by layer."""
    c, own = conversion, conversion.recipe.knobs("allocation")
    problem = problem_of(c.recipe, c.kv_ratio, c.geometry)
    counts = len(considered(problem, own["counts"])) - 1
    fitted = (
        min(own["fit_steps"], c.recipe.knobs("refinement").get("fit_steps", 0)) * PLANNING_BATCH * c.sequence_length
    )
    checked = min(c.used_tokens, FIT_TOKENS) / 8
    once = 2.0 * size.attention * (FITTING * 3 * fitted + 2 * checked) + 2.0 * checked * c.geometry.hidden_size**2
    return counts * 2 * once + c.used_tokens * forward


def available_bytes(device: torch.device = CPU) -> int:
    """Memory that new work may take, on the GPU if that is where it runs; 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return loading.kernel_field("/proc/meminfo", "MemAvailable")


def matmul_rate(dtype: torch.dtype, size: int = 1024) -> float:
    """Operations a second of a matrix product in `dtype` here: the fastest of ten, as others may be held up."""
    a, seconds = torch.ones(size, size, dtype=dtype), []
    for _ in range(10):
        started = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - started)
    return 2.0 * size**3 / max(min(seconds), 1e-9)
