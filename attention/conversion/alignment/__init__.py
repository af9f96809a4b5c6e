"""Alignment: turn the heads of a group towards each other before they are pooled.

The model stays what it was.

A part is `f(heads, plan, statistics, geometry, **knobs) -> LayerHeads` on lifted heads (one key and
one value head per query head): the same layer, other coordinates.
"""
