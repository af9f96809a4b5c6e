"""Similarity of the heads of a layer: one file a part.

A part is `f(heads, statistics, geometry, side, **knobs) -> Tensor [H, H]`: lifted heads, symmetric,
higher is closer. `side` is "key" or "value".
"""
