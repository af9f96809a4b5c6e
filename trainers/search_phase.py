"""The training of DHA's search phase where a conversion runs it (`trainers.fusion_search`)."""

from __future__ import annotations

import math

from trainers.settings import TrainSettings

FUSION_DISTANCES = "fusion_distances"
"""What a recipe needs whose plan is based on a search phase."""
_SEQUENCES = 8  # of a step; silent in the paper
_TOKENS_AT_ONCE = 2048
"""In memory for the backward pass, which stores all that a layer has computed."""


def search_phase_settings(sequences: int, length: int) -> TrainSettings:
    """Return the settings of a search phase on so many sequences of `length` tokens."""
    batch = min(_SEQUENCES, sequences)
    at_once = math.gcd(batch, max(1, _TOKENS_AT_ONCE // length))
    return TrainSettings(zero_stage=0, batch_size=batch, micro_batch_size=at_once)
