"""Ways to spread a total of kept heads over layers and over keys and values.

A part, one per file, is `f(problem: AllocationProblem, **knobs) -> tuple of (key heads, value
heads), one pair per layer`, meeting the total exactly, or ValueError. `needs`: "apart" marks parts
that choose counts for keys and values separately, "by_layer" those whose layers may differ,
"any_count" those whose counts need not divide the heads.
"""
