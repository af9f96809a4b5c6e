"""The training of DHA's search phase where a conversion runs it (`trainers.fusion_search`)."""

from __future__ import annotations

from attention.modeling.running import batch_of
from trainers.settings import TrainSettings

_SEQUENCES = 8
"""Of a step. The paper is silent."""


def search_phase_settings(sequences: int, length: int) -> TrainSettings:
    """Return the settings of a search phase on so many sequences of `length` tokens."""
    batch = min(_SEQUENCES, sequences)
    most = batch_of(length, batch)
    at_once = max(rows for rows in range(1, most + 1) if batch % rows == 0)
    return TrainSettings(zero_stage=0, batch_size=batch, micro_batch_size=at_once)
