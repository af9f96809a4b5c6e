"""Ways to let heads of later layers use the weights of earlier ones.

A part, one per file, is `f(problem: SharingProblem, **knobs) -> Shares`. Sharing saves weights and
optimiser state, not KV cache.
"""
