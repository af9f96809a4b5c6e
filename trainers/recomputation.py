"""Ways to run decoder layers in training.

Which inner values are stored for the backward pass and which are recomputed, and compiled layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from attention.families import family_of
from attention.modeling.running import layer_of
from trainers.settings import TrainSettings

_aten: Any = torch.ops.aten
KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
"""Operations whose results `selective` keeps: those that take the time. Scores of all heads are
matrix products of batches and are made again, since they are larger than all else."""
FORMS = 8  # of a compiled layer: in training and evaluation, for whole and for partial batches


def recompute(model: Any, settings: TrainSettings) -> None:
    """Have a model of transformers keep as much of its layers as the settings say."""
    if settings.activation_checkpointing in (False, "auto"):
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if settings.activation_checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT)
    model.activation_checkpointing_enable(options)


def compile_layers(model: PreTrainedModel) -> None:
    """Have each decoder layer run compiled; names of weights stay as they are.

    Layers share their code, and each may need a separate compiled form (for its maps, its window),
    in training and in evaluation: the compiler's limit of forms is raised accordingly.
    """
    import torch._dynamo.config  # here, and not above: it takes a second, and few compile

    modules = family_of(model.config).attention_modules(model)
    limits: Any = torch._dynamo.config
    forms = FORMS * len(modules)
    limits.recompile_limit = max(limits.recompile_limit, forms)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, forms)
    for module in modules:
        layer_of(model, module).compile()
