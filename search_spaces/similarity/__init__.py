"""Similarity of the heads of a layer.

A part, one per file, is `f(heads, statistics, geometry, side, **knobs) -> Tensor [H, H]`: lifted
heads, symmetric, higher is closer. `side` is "key" or "value".
"""
