"""Share of a GPU's peak that a training uses: model and hardware FLOPs utilization (MFU and HFU).

MFU (Chowdhery 2022, PaLM, appendix B) counts the operations of the model itself, forward and
backward: 6 for each trained parameter that is multiplied and token, 4 for each frozen one, and the
products of causal attention, half of a square. Only the experts that a token is routed to count; a
table of embeddings is a lookup, and counts where the head multiplies by it. HFU adds the repeated
or additional forward passes: that of activation checkpointing, and the teacher's. Norms, the
softmax, losses and the optimizer are left out of both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from attention.families import geometry_of

_TERA = 1e12
PEAKS = {
    "V100 SXM2": 125.0,
    "V100 SXM3": 125.0,
    "V100 PCIE": 112.0,
    "T4": 65.0,
    "A10": 125.0,
    "A10G": 70.0,
    "A30": 165.0,
    "A40": 149.7,
    "A100": 312.0,
    "L4": 121.0,
    "L40": 181.0,
    "L40S": 362.0,
    "H20": 148.0,
    "H100": 989.4,
    "H100 PCIE": 756.0,
    "H100 NVL": 835.5,
    "H200": 989.4,
    "H200 NVL": 835.5,
    "GH200": 989.4,
    "B200": 2250.0,
    "GB200": 2500.0,
}
"""TFLOP/s of dense bfloat16 products, by words of the name that `torch.cuda.get_device_name` gives.

From NVIDIA's data sheets of each card, whose figures with sparsity are halved; A10G's from the data
sheet that AWS has of it. V100 and T4 have no bfloat16 tensor cores: theirs are those of float16.
A100 has the same on SXM and PCIe; an H100 without a further word is the SXM card.
"""


def peak_flops(name: str | None = None) -> float | None:
    """Return the operations per second of a GPU's dense bfloat16 products.

    Args:
        name: As `torch.cuda.get_device_name` gives it; None for the GPU of this process.

    Returns:
        None without a GPU, for one that is not known, and for a part of one (MIG).
    """
    if name is None:
        if not torch.cuda.is_available():
            return None
        name = torch.cuda.get_device_name()
    # "Tesla V100-SXM2-16GB", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if "MIG" in words:
        return None
    fitting = [key for key in PEAKS if words.issuperset(key.split())]
    return PEAKS[max(fitting, key=len)] * _TERA if fitting else None


@dataclass(frozen=True)
class TokenWork:
    """Floating-point operations of one token of a training, forward and back.

    Attributes:
        model: Those of the model, which MFU counts.
        hardware: Those that are executed, which HFU counts.
    """

    model: float
    hardware: float

    @classmethod
    def of(
        cls, model: Any, length: int, *, recomputed: bool = False, teacher: Any = None
    ) -> TokenWork:
        """Return the work of a training.

        Args:
            model: What is trained; with ZeRO 3 its parameters may be elsewhere.
            length: Tokens of a sequence.
            recomputed: Whether activations are computed again for the backward pass.
            teacher: The model that is learnt from; None without one.
        """
        trained, frozen = _multiplied(model)
        attention = _attention(model, length)
        forward = 2 * (trained + frozen) + attention
        work = 6 * trained + 4 * frozen + 3 * attention
        extra = forward if recomputed else 0.0
        if teacher is not None:
            extra += 2 * sum(_multiplied(teacher)) + _attention(teacher, length)
        return cls(work, work + extra)


def _multiplied(model: Any) -> tuple[float, float]:
    """Return the trained and the frozen parameters that a token is multiplied by."""
    config = model.config
    experts = next(
        (
            count
            for name in ("num_local_experts", "num_experts", "n_routed_experts")
            if (count := getattr(config, name, None))
        ),
        None,
    )
    share = 1.0 if experts is None else getattr(config, "num_experts_per_tok", experts) / experts
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    looked_up = None if tied else model.get_input_embeddings().weight
    counts = {True: 0.0, False: 0.0}
    for name, parameter in model.named_parameters():
        if parameter is not looked_up:
            active = share if ".experts." in name else 1.0
            size = getattr(parameter, "ds_numel", parameter.numel())
            counts[bool(parameter.requires_grad)] += active * size
    return counts[True], counts[False]


def _attention(model: Any, length: int) -> float:
    """Return the operations of the products of attention of a token, forward, on average."""
    geometry = geometry_of(model.config)
    dims = geometry.num_layers * geometry.head_dim + sum(dim for _, dim in geometry.other_layers)
    # Queries by keys and weights by values: 2 operations each, over half of the positions
    return 2.0 * geometry.num_heads * dims * length
