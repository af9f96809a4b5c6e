"""Groups of an optimiser of plain torch, for trainings to compare with."""

from __future__ import annotations

from typing import Any

from torch import nn


def groups_by_decay(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices that decay, and norms, biases and embeddings, which do not."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and id(parameter) not in tables and not name.endswith("bias")
    ]
    chosen = {id(parameter) for parameter in decayed}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    return [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
