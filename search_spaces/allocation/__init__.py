"""How a total of kept heads is spread over layers and over keys and values: one file a part.

A part is `f(problem: AllocationProblem, **knobs) -> tuple of (key heads, value heads), one pair a
layer`, meeting the total exactly, or ValueError. `needs`: "apart" marks parts that give keys and
values counts of their own, "by_layer" those whose layers may differ, "any_count" those whose counts
are no divisors of the heads.
"""
