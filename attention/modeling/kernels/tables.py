"""A layer's two maps as the decode kernel reads them. Needs no Triton.

Legend: H query heads, U units of work, M query heads of a unit, N value heads that a unit reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attention.plan import LayerPlan

# Rows of a matrix product on an accelerator.
LEAST = 16
_MOST = 64


@dataclass(frozen=True)
class Tables:
    """Units of work.

    Query heads of one key head, at most `_MOST` of them, so that a wide group becomes several
    units.

    `keys [U]`: the key head of each unit; `members [U, M]`: its query heads, -1 beyond; `values [U,
    N]`: the value heads that any of them reads, of which the first `counts [U]` are real;
    `value_map [H]`. All int32, on the CPU; `on(device)` gives copies elsewhere, made once.
    `key_width` and `value_width`: those of the layer's plan.
    """

    keys: Tensor
    members: Tensor
    values: Tensor
    counts: Tensor
    value_map: Tensor
    key_width: int = 1
    value_width: int = 1
    _copies: dict[torch.device, Tables] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, plan: LayerPlan) -> Tables:
        """Return the tables of a layer, on the CPU."""
        units = [
            (key, group[start : start + _MOST])
            for key, group in enumerate(plan.key_groups)
            for start in range(0, len(group), _MOST)
        ]
        read = [sorted({plan.value_map[h] for h in members}) for _, members in units]
        rows = max(LEAST, 1 << (max(len(members) for _, members in units) - 1).bit_length())
        return cls(
            _int32([key for key, _ in units]),
            _int32([[*members, *[-1] * (rows - len(members))] for _, members in units]),
            _int32([[*values, *[-1] * (max(map(len, read)) - len(values))] for values in read]),
            _int32([len(values) for values in read]),
            _int32(plan.value_map),
            *plan.widths,
        )

    def on(self, device: torch.device) -> Tables:
        """Return the tables on a device, copied once."""
        if device == self.keys.device:
            return self
        if device not in self._copies:
            tensors: dict[str, Any] = {
                name: tensor.to(device)
                for name, tensor in self.__dict__.items()
                if isinstance(tensor, Tensor)
            }
            self._copies[device] = replace(self, **tensors, _copies={})
        return self._copies[device]

    def __getstate__(self) -> dict[str, object]:
        """Leave out the copies on devices, which may not exist where a pickled model is read."""
        return {**self.__dict__, "_copies": {}}


def _int32(numbers: Sequence[object]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")
