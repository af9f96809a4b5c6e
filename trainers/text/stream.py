"""Batches for ever, in an order that a number of sequences, a seed and a position decide alone.

Legend: N sequences, T tokens a sequence, B sequences a step over all workers, W workers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class BatchStream:
    """Endless shuffled epochs over `sequences [N, T]`: `next()` gives this worker's rows of a step, `[B / W, T]` int64.

    Worker r of W gets rows r B/W to (r + 1) B/W of the step, so that all workers together see exactly what one worker
    would. An epoch's remainder is not dropped: the step that meets its end goes on with the next epoch's order.
    The state is a position, so resuming is exact, also with another number of workers.
    """

    def __init__(
        self, sequences: Tensor, batch_size: int, *, rank: int = 0, world_size: int = 1, seed: int = 0
    ) -> None:
        if sequences.ndim != 2 or not len(sequences):
            raise ValueError(f"sequences must be [N, T] with at least one row, got shape {tuple(sequences.shape)}")
        if batch_size < 1 or batch_size % world_size:
            raise ValueError(f"batch_size must be a multiple of the {world_size} workers, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        self._sequences, self._batch_size, self._seed = sequences, batch_size, seed
        self._share = batch_size // world_size
        self._first = rank * self._share
        self._position = 0
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def next(self) -> Tensor:
        start = self._position + self._first
        rows = [self._row(position) for position in range(start, start + self._share)]
        self._position += self._batch_size
        return self._sequences[rows].long()

    def _row(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._sequences))
        if epoch != self._epoch:
            # a seed of its own for each (seed, epoch), so that a position can be reached without the ones before
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._sequences), generator=generator)
        return int(self._order[offset])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "seed": self._seed, "sequences": len(self._sequences)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError for a state of another seed or of other data."""
        for name, mine in (("seed", self._seed), ("sequences", len(self._sequences))):
            if state[name] != mine:
                raise ValueError(
                    f"the stream's {name} must be {mine}, as here, got {state[name]}; start a new stream instead"
                )
        self._position = int(state["position"])
