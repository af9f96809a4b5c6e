"""Constant tensors of a model, with a copy on each device that reads them."""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceConstant:
    """A constant tensor, stored on the CPU and copied once to each other device that asks.

    A copy for each forward pass would make a GPU wait. It is no buffer: a model is built on the
    meta device while it is loaded, and a buffer that is not in its checkpoint would stay there.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.cpu()
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return the tensor on a device."""
        if device == self.tensor.device:
            return self.tensor
        if device not in self._copies:
            with torch.inference_mode(False):  # a training may use it later
                self._copies[device] = self.tensor.to(device)
        return self._copies[device]

    def __getstate__(self) -> dict[str, object]:
        """Leave out the copies: their devices may not exist where a pickled model is read."""
        return {**vars(self), "_copies": {}}
