"""Similarity of the heads of a layer: one file a part.

A part is `f(heads, statistics, geometry, side, **knobs) -> Tensor [H, H]`: lifted heads, symmetric, higher is closer.
`side` is "key" or "value".
"""

from search_spaces.axes import SIMILARITY
from search_spaces.similarity.activation import activation_similarity
from search_spaces.similarity.cka import cka, redundancy

__all__ = ["SIMILARITY", "activation_similarity", "cka", "redundancy"]
