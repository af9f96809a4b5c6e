"""`headfold estimate`: what a conversion will take, from the checkpoint's config alone, before it is run.

Legend: L layers, H query heads, d head dim, D model dim, e = D + 1, V vocabulary, C calibration tokens, E held-out
tokens, N = C + E, b bytes of a weight that is worked on (4 on the CPU), T tokens a sequence, B sequences a batch.

Peaks are the largest of the stages of a conversion, each the sum of what it holds at once; small things (token ids, one
batch of activations) are left out.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from attention.calibration.collecting import SLICE_BYTES
from attention.calibration.sizes import Mixed, layer_bytes, matrices
from attention.conversion.refinement.local import FIT_TOKENS
from attention.conversion.sensitivity import BATCH as SENSITIVITY_BATCH
from attention.families import family_of, geometry_of
from attention.geometry import HeadGeometry
from attention.io.layers.windows import empty, layer_prefix, window_config
from attention.modeling.predictions import most_logit_bytes
from attention.ratios import own_heads
from orchestrator.conversion import loading
from orchestrator.conversion.one_layer import batch_size, check_layerwise
from orchestrator.conversion.request import ConversionRequest
from orchestrator.storage.records import percent, unmet
from search_spaces.allocation.knapsack import considered
from search_spaces.planning.budgets import nearest_budget, problem_of
from search_spaces.planning.context import PLANNING_BATCH
from search_spaces.recipes.recipe import AXES, Recipe

FLOAT, DOUBLE = 4, 8
ADAM_COPIES = 7  # of the float32 attention layer in a local fit: itself, start, best, gradient, two moments, one spare
READING, READ = 270 * 2**20, 110 * 2**20  # libraries that read and split texts: at work, and what stays of them
SPARE = 0.9  # share of the available memory that a conversion may plan with
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Size:
    """Numbers (not bytes) of a checkpoint: parameters of one attention module, of one decoder layer, of the embedding
    matrix, of all outside of the layers, of all."""

    attention: int
    layer: int
    embedding: int
    outer: int
    total: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Size:
        """Counted on a model of one layer without storage. Raises ValueError for an unsupported family."""
        with torch.device("meta"):
            model = empty(window_config(config, 0, config.vocab_size), torch.float32, torch.device("meta"))
        family, prefix = family_of(config), layer_prefix(model)
        attention = loading.parameters(family.attention_modules(model)[0])
        layer = sum(p.numel() for name, p in model.named_parameters() if name.startswith(prefix))
        embedding = model.get_input_embeddings().weight.numel()  # type: ignore[union-attr]
        outer = loading.parameters(model) - layer - (embedding if config.tie_word_embeddings else 0)
        return cls(attention, layer, embedding, outer, outer + layer * geometry_of(config).num_layers)


@dataclass(frozen=True)
class Estimate:
    """Bytes, floating-point operations, seconds.

    `kv_bytes_per_token`, `kv_bytes_per_token_original`: of the converted and of the original model, heads alone.
    `resident`, `layerwise`: peak memory of the process in either way, all it needs besides included; `stages`: what it
    comes to at each stage, by name; `layerwise_possible`: whether there is the second way, else `why_not` says why.
    `disk`: of the result; `scratch`: of what lies beside it on the way. `flops` of the way layer by layer; `seconds` of
    it at the speed that a matrix product has here (`rate`, operations a second), planning left out.
    """

    kv_ratio: float
    kv_ratio_asked: float
    kv_bytes_per_token: int
    kv_bytes_per_token_original: int
    parameters: int
    resident: int
    layerwise: int
    stages: dict[str, int]
    layerwise_possible: bool
    why_not: str
    available: int
    disk: int
    scratch: int
    flops: float
    rate: float
    seconds: float


@dataclass(frozen=True)
class Conversion:
    """What is estimated: everything that the formulas read. `kv_ratio`: of the checkpoint's own KV cache; `dtype`: of
    what is written, `working`: of what is computed in; `mixed`: how the mixed moments are kept; `in_files`: whether the
    statistics lie in files, of which a layer at a time is mapped."""

    config: PretrainedConfig
    recipe: Recipe
    kv_ratio: float
    calibration_tokens: int
    eval_tokens: int
    sequence_length: int
    dtype: torch.dtype
    working: torch.dtype = torch.float32
    mixed: Mixed = "float32"
    in_files: bool = False

    @property
    def geometry(self) -> HeadGeometry:
        return geometry_of(self.config)

    @property
    def used_tokens(self) -> int:
        """Calibration tokens that the recipe looks at."""
        needed = bool(self.recipe.needs & {"statistics", "sequences", "model"})
        return self.calibration_tokens if needed else 0

    def statistics(self) -> int:
        """Bytes of one layer's statistics."""
        if "statistics" not in self.recipe.needs:
            return 0
        return layer_bytes(self.geometry, self.used_tokens, self.mixed)

    def sums(self) -> int:
        """Bytes of one layer's mixed moments while they are summed, as whole matrices."""
        g = self.geometry
        return FLOAT * matrices(g, self.mixed) * (g.hidden_size + 1) ** 2 if self.statistics() else 0

    def calibrating(self) -> int:
        """Bytes of a calibration pass besides the statistics: float32 queries, one batch of activations and of its
        attention weights a slice."""
        if "statistics" not in self.recipe.needs:
            return 0
        g, length = self.geometry, self.sequence_length
        batch = batch_size(g.num_heads, length)
        scores = 3 * min(SLICE_BYTES, FLOAT * batch * length**2)
        # x~ and its mixture, and the product of either with itself before it is added
        wide = g.hidden_size + 1
        return self.heads() // 4 + scores + FLOAT * (3 * batch * length * wide + wide**2)

    def heads(self) -> int:
        """Bytes of one layer's lifted heads in float32."""
        g = self.geometry
        return FLOAT * 4 * g.num_heads * g.head_dim * g.hidden_size

    def fusing(self) -> int:
        """Bytes of the Gram matrices that grouping and fusion of a layer work on, in float64 if not said otherwise."""
        if "statistics" not in self.recipe.needs:
            return 0
        g, parts = self.geometry, (self.recipe.fusion, self.recipe.alignment)
        keys, rows = DOUBLE * (g.num_heads * g.head_dim) ** 2, DOUBLE * g.num_heads * g.head_dim * (g.hidden_size + 1)
        held = 4 * keys + 2 * rows
        if self.recipe.objective == "least_squares":
            # All heads' Grams under each head's weights, in float32, once more as matrices for one group of all.
            return held + 2 * FLOAT * g.num_heads**3 * g.head_dim**2
        # Fusion alone makes them for one group after the other, here for the largest of equal groups.
        members = math.ceil(g.num_heads / (g.num_kv_heads * self.kv_ratio) - 1e-9) if "least_squares" in parts else 0
        return held + 3 * DOUBLE * members**3 * g.head_dim**2

    @property
    def planned_on(self) -> int:
        """Tokens on which a plan of all layers looks at the sensitivity of their outputs; 0 for another plan."""
        if "measure" not in AXES["allocation"].get(self.recipe.allocation).needs:
            return 0
        return min(self.used_tokens, max(self.recipe.knobs("allocation")["tokens"], self.sequence_length))

    def plan_files(self, width: int) -> int:
        """Bytes that a plan of all layers leaves on disk on the way: each layer's metric, and what enters the layer."""
        g, planned = self.geometry, self.planned_on
        return g.num_layers * g.hidden_size * (FLOAT * g.hidden_size + width * planned) if planned else 0

    def gradients(self, size: Size) -> int:
        """Bytes that a pass through one layer keeps for its backward pass: what its products put out, for a batch, and
        its attention weights."""
        g, rows = self.geometry, SENSITIVITY_BATCH * self.sequence_length
        return FLOAT * rows * (2 * size.layer // g.hidden_size + 3 * g.num_heads * self.sequence_length)

    def refining(self, size: Size) -> int:
        """Bytes of a local fit, or of a ridge refit, whichever is more."""
        g = self.geometry
        features = g.num_heads * g.head_dim
        heal = DOUBLE * (5 * features**2 + 4 * features * g.hidden_size) if "heal" in self.recipe.refinement else 0
        if self.recipe.refinement != "fit_heal":
            return heal
        tokens = min(self.used_tokens, self.recipe.knobs("refinement")["fit_tokens"])
        return max(heal, FLOAT * (ADAM_COPIES * size.attention + 2 * tokens * g.hidden_size))


def estimate(conversion: Conversion, *, base: int | None = None) -> Estimate:
    """Memory, disk and time of a conversion. `base`: bytes of the process before it starts (default: as it is now)."""
    size, g = Size.of(conversion.config), conversion.geometry
    base = loading.memory_now() if base is None else base
    width, written = conversion.working.itemsize, conversion.dtype.itemsize
    tokens = conversion.used_tokens + conversion.eval_tokens
    stages = {name: base + READ + held for name, held in layerwise_stages(conversion, size, width, tokens).items()}
    stages["texts"] = base + READING
    resident = base + READ + resident_peak(conversion, size, width)
    try:
        check_layerwise(conversion.recipe, conversion.config)
        why_not = ""
    except ValueError as error:
        why_not = str(error)
    flops = operations(conversion, size, tokens)
    rate = matmul_rate(conversion.working)
    projections = own_heads(g) * g.head_dim * g.hidden_size
    kept = size.total - projections + round(projections * conversion.kv_ratio)
    original = own_heads(g) * g.head_dim * written
    return Estimate(
        kv_ratio=conversion.kv_ratio,
        kv_ratio_asked=conversion.kv_ratio,
        kv_bytes_per_token=round(original * conversion.kv_ratio),
        kv_bytes_per_token_original=original,
        parameters=size.total,
        resident=resident,
        layerwise=max(stages.values()),
        stages=stages,
        layerwise_possible=not why_not,
        why_not=why_not,
        available=available_bytes(),
        disk=written * kept,
        scratch=4 * width * tokens * g.hidden_size + conversion.plan_files(width),
        flops=flops,
        rate=rate,
        seconds=flops / rate,
    )


def layerwise_stages(conversion: Conversion, size: Size, width: int, tokens: int) -> dict[str, int]:
    """Bytes that a conversion layer by layer holds at each stage, the process itself left out."""
    g, c = conversion.geometry, conversion
    streams = 2 * width * tokens * g.hidden_size
    layer, statistics = width * size.layer, c.statistics()
    logits = most_logit_bytes(g.vocab_size, c.eval_tokens)
    metric, planned = FLOAT * g.hidden_size**2, {}
    if c.planned_on:
        carried = (width + FLOAT) * c.planned_on * g.hidden_size
        planned["sensitivity"] = carried + max(layer + c.gradients(size) + 3 * metric, width * size.embedding + logits)
    return planned | {
        "embedding": streams + width * size.embedding,
        "calibrate": streams + layer + statistics + c.sums() + c.calibrating(),
        "plan": streams + layer + statistics + c.heads() + c.fusing(),
        "convert": streams + 2 * layer + statistics + 4 * c.heads(),
        "refine": streams + 2 * layer + statistics + c.refining(size),
        "write": 2 * streams + 3 * layer,
        "head": streams + width * size.embedding + logits,
        "outside": 2 * width * size.outer,
    }


def in_memory_stages(conversion: Conversion, size: Size) -> dict[str, int]:
    """Bytes that a conversion in memory holds at each stage besides the model and the converted one's attention. Heads
    are lifted a layer at a time: lifted, aligned, fused."""
    c = conversion
    everywhere = c.geometry.num_layers * c.heads() if c.recipe.sharing != "none" else 0
    planned = c.geometry.num_layers * FLOAT * c.geometry.hidden_size**2 + c.gradients(size) if c.planned_on else 0
    return {
        "sensitivity": planned,
        "plan": everywhere + c.statistics() + 3 * c.heads() + c.fusing(),
        "refine": c.statistics() + c.refining(size),
    }


def converted_attention(conversion: Conversion, size: Size) -> int:
    """Bytes of what a conversion in memory holds of a second model: its attention. Another one, of a head for each
    query head, is what increases of the loss are measured on."""
    c, g = conversion, conversion.geometry
    measured = "measure" in AXES["allocation"].get(c.recipe.allocation).needs or c.recipe.relaxation != "none"
    whole = 4 * g.num_heads * g.head_dim * g.hidden_size
    return c.working.itemsize * g.num_layers * (size.attention + measured * whole)


def resident_peak(conversion: Conversion, size: Size, width: int) -> int:
    """Bytes that a conversion in memory holds at its largest stage, the process itself left out."""
    g, c = conversion.geometry, conversion
    model, layers = width * size.total + converted_attention(c, size), g.num_layers
    others = c.statistics() * (0 if c.in_files else layers - 1)
    logits = most_logit_bytes(g.vocab_size, min(c.eval_tokens, 8 * c.sequence_length))
    rounded = c.dtype.itemsize * size.total if c.dtype != c.working else 0
    calibrating = c.statistics() + (1 if c.in_files else layers) * c.sums() + c.calibrating()
    return model + others + max(calibrating, *in_memory_stages(c, size).values(), logits, rounded)


def operations(conversion: Conversion, size: Size, tokens: int) -> float:
    """Floating-point operations of a conversion layer by layer: forward passes, statistics, refinement, held-out
    logits."""
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
    if "heal" in c.recipe.refinement:
        passes += c.used_tokens * (4.0 * size.attention + 2.0 * features * (features + g.hidden_size)) + features**3
    if c.recipe.refinement == "fit_heal":
        knobs = c.recipe.knobs("refinement")
        passes += knobs["fit_steps"] * knobs["fit_batch"] * c.sequence_length * 6.0 * size.attention
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
    once = 2.0 * size.attention * (3 * fitted + 2 * checked) + 2.0 * checked * c.geometry.hidden_size**2
    return counts * 2 * once + c.used_tokens * forward


# ---- this machine -----------------------------------------------------------------------------------------------


def available_bytes(device: torch.device = CPU) -> int:
    """Memory that new work may take, on the GPU if that is where it runs; 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return loading.kernel_field("/proc/meminfo", "MemAvailable")


def matmul_rate(dtype: torch.dtype, size: int = 1024) -> float:
    """Operations a second of a matrix product in `dtype` here, from three of them."""
    a = torch.ones(size, size, dtype=dtype)
    torch.mm(a, a)
    started = time.perf_counter()
    for _ in range(3):
        torch.mm(a, a)
    return 3 * 2.0 * size**3 / max(time.perf_counter() - started, 1e-9)


# ---- verbs ------------------------------------------------------------------------------------------------------


def estimate_conversion(
    model: str | Path,
    recipe: str | Recipe,
    kv_ratio: float,
    *,
    nearest: bool = False,
    **settings: Any,
) -> Estimate:
    """The estimate of `convert_checkpoint` with these arguments, from config.json alone. Raises as that does.

    `nearest`: of `convert_curve`, which rounds down what the recipe cannot meet.
    """
    asked = ConversionRequest.check(model, recipe, [kv_ratio], config_only=True, nearest=nearest, **settings)
    met = nearest_budget(asked.recipe, kv_ratio, asked.geometry) if nearest else kv_ratio
    sizes = (asked.calibration_tokens, asked.eval_tokens, asked.sequence_length)
    result = estimate(Conversion(asked.config, asked.recipe, float(met), *sizes, asked.written, asked.working))
    return replace(result, kv_ratio_asked=float(kv_ratio), available=available_bytes(loading.device_of(asked.device)))


def needs_layerwise(model: str | Path, recipe: str | Recipe, kv_ratio: float, **settings: Any) -> bool:
    """Whether a conversion does not fit into the memory that is available, but would layer by layer."""
    estimated = estimate_conversion(model, recipe, kv_ratio, **settings)
    if not estimated.available or estimated.resident <= SPARE * estimated.available:
        return False
    words = describe(estimated)
    about = f"about {words['in memory']} in memory, {words['available now']} available; layer by layer: "
    print(f"this conversion would take {about}{words['layer by layer']}", file=sys.stderr)
    return estimated.layerwise_possible


def describe(estimated: Estimate) -> Mapping[str, str]:
    """The estimate in words, by what they are about."""
    giga = 2.0**30
    largest = max(estimated.stages, key=lambda name: estimated.stages[name])
    return {
        "cache": f"{percent(estimated.kv_ratio)} of the checkpoint's{unmet(vars(estimated))}: "
        f"{estimated.kv_bytes_per_token:,} of {estimated.kv_bytes_per_token_original:,} KV bytes a token",
        "in memory": f"{estimated.resident / giga:.1f} GiB",
        "layer by layer": f"{estimated.layerwise / giga:.1f} GiB (stage: {largest})"
        if estimated.layerwise_possible
        else estimated.why_not,
        "available now": f"{estimated.available / giga:.1f} GiB" if estimated.available else "unknown",
        "disk": f"{estimated.disk / giga:.2f} GiB, and {estimated.scratch / giga:.2f} GiB on the way (layer by layer)",
        "work": f"{estimated.flops:.2g} operations; about {estimated.seconds / 60:.1f} min here on "
        f"{os.cpu_count()} CPUs, grouping left out",
    }
