"""Alignment: turn the heads of a group towards each other before they are pooled; the model stays what it was.

A part is `f(heads, plan, statistics, geometry, **knobs) -> LayerHeads` on lifted heads (one key and one value head a
query head): the same layer, other coordinates.
"""

from attention.conversion.alignment.axis import ALIGNMENT
from attention.conversion.alignment.generalised import (
    align,
    align_group,
    align_heads,
    rotate_keys,
    rotate_values,
    unaligned,
)
from attention.conversion.alignment.grams import CRITERIA, head_gram, pair_similarity
from attention.conversion.alignment.rotations import procrustes, rotary_procrustes, rotation_from_cross

__all__ = [
    "ALIGNMENT",
    "CRITERIA",
    "align",
    "align_group",
    "align_heads",
    "head_gram",
    "pair_similarity",
    "procrustes",
    "rotary_procrustes",
    "rotate_keys",
    "rotate_values",
    "rotation_from_cross",
    "unaligned",
]
