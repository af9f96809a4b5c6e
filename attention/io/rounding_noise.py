"""The change in the logits of a model by rounding alone: its float32 noise.

It grows with depth, width and the size of the logits, so it is measured: the same model runs twice,
the second time with the sums of every projection in another order. In exact arithmetic nothing
changes.

Legend: B sequences, T tokens, V vocabulary, I features that a projection reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

NOISE_FACTOR = 8.0
"""An exact export is another order too, of other sums: it may differ by so many times the noise."""
_ORDERS = 2
_LINEAR: Any = torch._C._nn.linear  # pyright: ignore[reportAttributeAccessIssue]
"""`torch.nn.functional.linear`, which DeepSpeed replaces in processes that have used ZeRO 3."""


class _ReorderedSums(TorchFunctionMode):
    """Within, every projection sums over its input features in an order drawn by `generator`."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator
        self._replaced: Any = None

    def __enter__(self) -> _ReorderedSums:
        self._replaced = F.linear
        F.linear = _LINEAR
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        F.linear = self._replaced

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _LINEAR:
            features, weight, *bias = args
            order = self._order(weight.shape[1]).to(weight.device)
            args = (features[..., order], weight[:, order], *bias)
        elif func is torch.addmm:  # of `Conv1D`, the projections of GPT-2
            bias, features, weight = args
            order = self._order(weight.shape[0]).to(weight.device)
            args = (bias, features[:, order], weight[order])
        return func(*args, **(kwargs or {}))

    def _order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)


@torch.no_grad()
def logit_tolerance(
    logits_of: Callable[[], Iterable[Tensor]],
    expected: Iterable[Tensor],
    generator: torch.Generator,
) -> tuple[float, float]:
    """Return how far the logits of an exact copy of a model may differ from its own, and the noise.

    The tolerance is NOISE_FACTOR times the noise, and at least the spacing of float32 at the
    largest logit.

    Args:
        logits_of: Runs the model.
        expected: What it returned before.
        generator: Draws the orders of the sums.
    """
    reference = list(expected)
    noise = 0.0
    for _ in range(_ORDERS):
        with _ReorderedSums(generator):
            again = list(logits_of())
        for one, other in zip(reference, again, strict=True):
            noise = max(noise, (one - other).abs().max().item())
    largest = max(one.abs().max().item() for one in reference)
    spacing = torch.finfo(torch.float32).eps * largest
    return NOISE_FACTOR * max(noise, spacing), noise
