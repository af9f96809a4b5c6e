"""Peak memory of a conversion: the largest of its stages.

Each stage is the sum of all tensors in memory at once. Small ones (token ids, one batch of
activations) are left out.
"""

from __future__ import annotations

import torch

from attention.base.memory import container_memory, kernel_field
from attention.conversion.refinement.parallel import layers_at_once
from attention.modeling.predictions import most_logit_bytes
from orchestrator.resources.size import CPU, FLOAT, Conversion, Size
from trainers.evaluation import TEACHER_BYTES


def layerwise_stages(
    conversion: Conversion, size: Size, width: int, tokens: int, gpu_memory: int = 0
) -> dict[str, int]:
    """Return the bytes of each stage of a conversion layer by layer, less the process itself.

    Args:
        gpu_memory: Of the GPU that it runs on; 0 for the CPU.
    """
    g, c = conversion.geometry, conversion
    streams = 2 * width * tokens * g.hidden_size
    layer, statistics = width * size.layer, c.statistics()
    logits = most_logit_bytes(g.vocab_size, c.eval_tokens, gpu_memory)
    metric = FLOAT * g.hidden_size**2
    planned: dict[str, int] = {}
    if c.planned_on:
        carried = (width + FLOAT) * c.planned_on * g.hidden_size
        planned["sensitivity"] = carried + max(
            layer + c.gradients(size) + 3 * metric, width * size.embedding + logits
        )
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


def in_memory_stages(conversion: Conversion, size: Size, gpu_memory: int = 0) -> dict[str, int]:
    """Return the bytes of each stage of a conversion in memory, the two models left out.

    Heads are lifted a layer at a time: lifted, aligned, fused.
    """
    c = conversion
    everywhere = c.geometry.num_layers * c.heads() if c.recipe.sharing != "none" else 0
    metrics = c.geometry.num_layers * FLOAT * c.geometry.hidden_size**2 if c.planned_on else 0
    at_once = layers_at_once(c.geometry.num_layers, size.attention, CPU)
    fitted = c.fitting(size, at_once) if c.planned_on else 0
    drawn = (
        c.gradients(size) + most_logit_bytes(c.geometry.vocab_size, c.planned_on, gpu_memory)
        if c.planned_on
        else 0
    )
    return {
        "sensitivity": metrics + drawn,
        "plan": metrics + fitted + everywhere + c.statistics() + 3 * c.heads() + c.fusing(),
        "refine": metrics + c.statistics() + c.refining(size, at_once),
        "polish": c.statistics() + c.polishing(size, gpu_memory),
    }


def converted_attention(conversion: Conversion, size: Size) -> int:
    """Return the bytes of the second model of a conversion in memory: its attention.

    Increases of the loss are measured on one more attention, with a head for each query head.
    """
    c, g = conversion, conversion.geometry
    measured = c.recipe.measures_increases or c.recipe.relaxation != "none"
    whole = 4 * g.num_heads * g.head_dim * g.hidden_size
    return c.working.itemsize * g.num_layers * (size.attention + measured * whole)


def all_statistics(conversion: Conversion) -> int:
    """Return the bytes of the statistics of all layers and of the sums that they are made of."""
    c = conversion
    layers = 1 if c.in_files else c.geometry.num_layers
    return layers * (c.statistics() + c.sums())


def resident_peak(
    conversion: Conversion,
    size: Size,
    width: int,
    gpu_memory: int = 0,
    searching: int = 0,
    *,
    on_gpu: bool = False,
) -> int:
    """Return the bytes of the largest stage of a conversion in memory, less the process itself.

    Args:
        searching: Bytes of DHA's search phase, for a recipe that has one.
        on_gpu: Whether it is the GPU's memory: of the statistics it has those of one layer at a
            time, the others are on the machine (`all_statistics`).
    """
    g, c = conversion.geometry, conversion
    model = width * size.total + converted_attention(c, size)
    layers = 1 if c.in_files or on_gpu else g.num_layers
    model += c.recorded() + min(TEACHER_BYTES, c.working.itemsize * c.eval_tokens * g.hidden_size)
    others = c.statistics() * (layers - 1)
    evaluated = min(c.eval_tokens, 8 * c.sequence_length)
    logits = most_logit_bytes(g.vocab_size, evaluated, gpu_memory)
    rounded = c.dtype.itemsize * size.total if c.dtype != c.working else 0
    calibrating = c.statistics() + layers * c.sums() + c.calibrating()
    stages = in_memory_stages(c, size, gpu_memory).values()
    return model + others + max(calibrating, searching, *stages, logits, rounded)


def available_bytes(device: torch.device = CPU) -> int:
    """Return the free memory, of the GPU if that is the device; 0 where it is not known.

    That of the machine is within the limits of a container.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = kernel_field("/proc/meminfo", "MemAvailable")
    limited = container_memory()
    return free if limited is None else min(free, limited)
