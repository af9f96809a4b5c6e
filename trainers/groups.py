"""Parameters that train at a rate of their own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with their own peak learning rate and weight decay. Warm-up and decay are those of all others."""

    parameters: tuple[nn.Parameter, ...]
    learning_rate: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError("a parameter group needs at least one parameter, got none")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate of a parameter group must be above 0, got {self.learning_rate}")
