"""Fusion: one key head for each key group and one value head for each value group, in closed form.

A part is `f(heads, plan, statistics, geometry, **knobs) -> LayerHeads` on lifted heads; the result
keeps G^K key and G^V value heads in the plan's order, with queries and output columns adjusted to
them. A group of one is copied bit by bit, so an identity plan changes nothing.
"""
