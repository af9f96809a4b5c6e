"""Random numbers that are the same on every device.

The CPU and each kind of GPU draw other numbers from one seed. What a result depends on is drawn on
the CPU, from a generator of the CPU, and then moved: same seed, same plan, same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_categories(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one category of each row of probabilities `[n, V]`, which sum to 1: `[n, 1]`.

    By exponential numbers, as `torch.multinomial` does on the CPU: p_v / e_v is largest for v with
    probability p_v.

    Args:
        probabilities: On any device.
        generator: Of the CPU.
    """
    if probabilities.is_cpu:
        return torch.multinomial(probabilities, 1, generator=generator)
    waits = torch.empty(probabilities.shape, dtype=probabilities.dtype)
    waits.exponential_(generator=generator)
    return (probabilities / waits.to(probabilities.device)).argmax(-1, keepdim=True)
